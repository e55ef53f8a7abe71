"""What is done about `torch._dynamo`, as soon as somebody imports it, and not before.

To import it takes 1 to 3 s of CPU, and most processes compile nothing: so nothing here, and nothing
that an attached model does, imports it. `torch.compile` does.
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
    """Call `do()` once `torch._dynamo` can be used: now, or by who imports it, before it returns.

    Blocks while another thread imports it.
    """
    with _lock:
        if _NAME not in sys.modules:
            if not _waiting:
                sys.meta_path.insert(0, _Finder())
            _waiting.append(do)
            return
    importlib.import_module(_NAME)  # another thread may be in the midst of it
    do()


class _Finder(MetaPathFinder):
    """Finds the one module, once, as those after it do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _NAME or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    """A module's own loader, and afterwards those who wait are told."""

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
    """Have a function of a module called as it is from compiled code, which is cut in two there.

    It is replaced, where its module has it, once there may be such code.
    """
    made = [function]

    def replace() -> None:
        made[0] = _disabled(function)
        setattr(sys.modules[function.__module__], function.__name__, made[0])

    when_imported(replace)
    return made[0]  # replaced already, if it could be


def _disabled(function: _F) -> _F:
    disable: Any = torch.compiler.disable
    try:
        called: _F = disable(
            function,
            reason="swapd brings weights in here. To export, or to compile as one graph: call "
            "detach() on the attachment, or compile first and attach what is compiled",
        )
    except TypeError:  # torch older than 2.7 cannot be told why
        called = disable(function)
    return called
