"""Work that needs `torch._dynamo`, done once another module imports it, and not before.

The import takes 1 to 3 s of CPU, and most processes compile nothing. So no code here, and none that
an attached model runs, imports it. `torch.compile` does.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

_NAME = "torch._dynamo"

_lock = threading.Lock()
_waiting: list[Callable[[], None]] = []


def when_imported(do: Callable[[], None]) -> None:
    """Call `do()` once `torch._dynamo` can be used: now, or at the end of its import.

    Blocks while another thread imports it.
    """
    with _lock:
        if _NAME not in sys.modules:
            if not _waiting:
                sys.meta_path.insert(0, _Finder())
            _waiting.append(do)
            return
    importlib.import_module(_NAME)  # another thread may be importing it
    do()


class _Finder(MetaPathFinder):
    """Finds that one module, once, by the finders after it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _NAME or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    """A module's own loader, which then runs the waiting callbacks."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            told = _waiting[:]
            _waiting.clear()
        for do in told:
            do()


_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Have compiled code call a module's function uncompiled, with a graph break.

    Replaces the function in its module once compiled code can exist.
    """
    made = [function]

    def replace() -> None:
        made[0] = _disabled(function)
        setattr(sys.modules[function.__module__], function.__name__, made[0])

    when_imported(replace)
    return made[0]  # replaced already, if that was possible


def _disabled(function: _F) -> _F:
    disable: Any = torch.compiler.disable
    try:
        called: _F = disable(
            function,
            reason="swapd loads weights here. To export, or to compile as one graph: call "
            "detach() on the attachment, or compile first and attach the compiled module",
        )
    except TypeError:  # torch before 2.7 takes no reason
        called = disable(function)
    return called
