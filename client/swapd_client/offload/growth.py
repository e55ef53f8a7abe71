"""Parameters and modules added to a component after it was attached (LoRA, new heads).

torch calls a hook for each one registered on any module of the process. The component is marked as
grown, and at its next call the log names once the parameters that stay private.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module
from torch.nn.modules import module as torchs

from swapd_client.offload import around, tools
from swapd_client.offload.dynamo import uncompiled

log = logging.getLogger("swapd_client")


class Growth:
    """The parameters that a component gained since it was attached."""

    def __init__(
        self, name: str, modules: Callable[[], Iterable[Module]], is_known: Callable[[Any], bool]
    ) -> None:
        """`modules()`: the modules of the component now. `is_known(tensor)`: it is in swapd, or
        stays private.
        """
        self.changed = False
        self._name = name
        self._modules = modules
        self._is_known = is_known

    def tell(self) -> None:
        """Log the parameters that stay private, and watch the new modules."""
        self.changed = False
        private = []
        for module in self._modules():
            _watched.setdefault(module, self)
            named = module._parameters.items()
            private += [n for n, p in named if p is not None and not self._is_known(p)]
        if private:
            log.warning(
                "%r has parameters that stay in private memory, since they were added after "
                "attach: %s. refresh() of its attachment registers them",
                self._name,
                ", ".join(private),
            )


_watched: "WeakKeyDictionary[Module, Growth]" = WeakKeyDictionary()
_lock = threading.Lock()
_handles: list[Any] = []


def watch(growth: Growth, modules: Iterable[Module]) -> Callable[[], None]:
    """Mark `growth` when a parameter or module is registered on these modules; returns the undo."""
    with _lock:
        for module in modules:
            _watched[module] = growth
        if not _handles:
            _handles.extend(
                register(_registered)
                for register in (
                    torchs.register_module_parameter_registration_hook,
                    torchs.register_module_module_registration_hook,
                )
            )

    def end() -> None:
        with _lock:
            for module in [m for m, its in _watched.items() if its is growth]:
                del _watched[module]
        rest()

    return end


def rest() -> None:
    """Remove the hooks from torch if no module is watched."""
    with _lock:
        if not _watched:
            for handle in _handles:
                handle.remove()
            _handles.clear()


@uncompiled
def _note(module: Module, new: object) -> None:
    tools.look()
    around.refuse(module, new)
    growth = _watched.get(module)
    if growth is not None and new is not None:
        growth.changed = True


def _registered(module: Module, name: str, new: object) -> None:
    _note(module, new)
