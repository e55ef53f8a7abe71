"""What an attached model needs of `torch._dynamo`, without importing it.

The import takes 1 to 3 s of CPU, so no code that an attached model runs may import it. Work that
needs it waits until `torch.compile` does.

The guards of compiled code ignore hooks: code compiled for another module of the class, or before
`attach`, would run without a lease. But they see whether a module has a `forward` of its own. So an
attached module gets one that calls the `forward` of its class. It gets it when `torch._dynamo` is
imported: before, no code can be compiled, and the `forward` would add a function to each call.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from swapd.shared.system import process_lock
from swapd_client.offload.copies import Marker

_NAME = "torch._dynamo"

_lock = process_lock()
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
    importlib.import_module(_NAME)  # waits for a thread that is importing it
    do()


class _Finder(MetaPathFinder):
    """Finds `torch._dynamo`, once, through the finders after this one, and wraps its loader."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _NAME or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader)
        return spec


class _NotifyingLoader(Loader):
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


_REASON = (
    "swapd loads weights here. To export, or to compile as one graph: call detach() on the "
    "attachment, or compile first and attach the compiled module"
)

_F = TypeVar("_F", bound=Callable[..., Any])


def skip(function: Callable[..., Any]) -> None:
    """Keep torch from compiling a function, but not what it calls. Imports `torch._dynamo`."""
    from torch._dynamo import decorators

    decorators.skip(function)
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


def uncompiled(function: _F) -> _F:
    """Decorate a function of a module: compiled code calls it uncompiled, with a graph break."""
    made = [function]

    def replace() -> None:
        made[0] = _disabled(function)
        setattr(sys.modules[function.__module__], function.__name__, made[0])

    when_imported(replace)
    return made[0]  # the replacement, if `torch._dynamo` was imported already


def _disabled(function: _F) -> _F:
    disable: Any = torch.compiler.disable
    try:
        called: _F = disable(function, reason=_REASON)
    except TypeError:  # torch before 2.8 takes no reason
        called = disable(function)
    return called


#: Modules that get a forward once code may be compiled. None: it may be compiled already.
_to_distinguish: WeakSet[torch.nn.Module] | None = WeakSet()


def distinguish(module: torch.nn.Module) -> None:
    """Keep code compiled for other modules away from `module`, until `undistinguish`.

    A module with a `forward` of its own keeps it: torch compiles separate code for it.
    """
    with _lock:
        if _to_distinguish is None:
            _give(module)
        else:
            _to_distinguish.add(module)


def undistinguish(module: torch.nn.Module) -> None:
    with _lock:
        if _to_distinguish is not None:
            _to_distinguish.discard(module)
        function = getattr(vars(module).get("forward"), "__func__", None)
        if hasattr(function, "marker"):  # else other code replaced it
            del vars(module)["forward"]


def _give(module: torch.nn.Module) -> None:
    kind = type(module)
    if "forward" not in vars(module) and isinstance(_static(kind), FunctionType):
        vars(module)["forward"] = MethodType(_of_class(kind), module)


def _give_all() -> None:
    global _to_distinguish
    with _lock:
        waiting, _to_distinguish = _to_distinguish or (), None
        for module in waiting:
            _give(module)


def _static(kind: type[torch.nn.Module]) -> Any:
    return inspect.getattr_static(kind, "forward", None)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


#: torch counts recompilations by code object, so each class has one of its own.
_by_class: "WeakKeyDictionary[type, FunctionType]" = WeakKeyDictionary()


def _of_class(kind: type[torch.nn.Module]) -> FunctionType:
    made = _by_class.get(kind)
    if made is None:
        name = f"{kind.__module__}.{kind.__qualname__}.forward"
        made = FunctionType(_forward.__code__.replace(co_name=name), globals(), "forward")
        made.marker = Marker()  # type: ignore[attr-defined]
        _by_class[kind] = made
    made.__wrapped__ = _static(kind)  # type: ignore[attr-defined] # gives it the signature
    made.__doc__ = made.__wrapped__.__doc__  # type: ignore[attr-defined]
    return made


when_imported(_give_all)
