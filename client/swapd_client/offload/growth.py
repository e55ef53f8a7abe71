"""Parameters and modules that come into a component after it was attached (LoRA, new heads).

torch tells of each that is registered on any module of the process; whoever watches a module
notes that it has grown, and at its next call says once what of it stays in private memory.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module
from torch.nn.modules import module as torchs

from swapd_client.offload import around
from swapd_client.offload.dynamo import uncompiled

log = logging.getLogger("swapd_client")


class Growth:
    """What a component got since it was attached."""

    def __init__(
        self, name: str, modules: Callable[[], Iterable[Module]], is_known: Callable[[Any], bool]
    ) -> None:
        """`modules()`: those of the component as it is now. `is_known(tensor)`: it is swapd's, or
        stays private.
        """
        self.changed = False
        self._name = name
        self._modules = modules
        self._is_known = is_known

    def tell(self) -> None:
        """Say what stays private, and watch what is new as well."""
        self.changed = False
        private = []
        for module in self._modules():
            _watched.setdefault(module, self)
            named = module._parameters.items()
            private += [n for n, p in named if p is not None and not self._is_known(p)]
        if private:
            log.warning(
                "%r has parameters that stay in private memory, for they came after it was "
                "attached: %s. refresh() of its attachment takes them in",
                self._name,
                ", ".join(private),
            )


_watched: "WeakKeyDictionary[Module, Growth]" = WeakKeyDictionary()
_lock = threading.Lock()
_handles: list[Any] = []


def watch(growth: Growth, modules: Iterable[Module]) -> Callable[[], None]:
    """Have `growth` told of what is registered on these; returns what ends that."""
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
    """Have torch tell of nothing any more, if nothing is watched."""
    with _lock:
        if not _watched:
            for handle in _handles:
                handle.remove()
            _handles.clear()


@uncompiled
def _note(module: Module, new: object) -> None:
    around.refuse(module, new)
    growth = _watched.get(module)
    if growth is not None and new is not None:
        growth.changed = True


def _registered(module: Module, name: str, new: object) -> None:
    _note(module, new)
