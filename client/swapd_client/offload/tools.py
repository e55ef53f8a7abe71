"""Functions of torch and PEFT that read or write weights outside of any call.

While a model is attached, each function of `TOOLS` runs in an edit of the attached tensors among
its arguments, and of those in modules among them. Code that imported a function by its name before
calls the original. Methods that models of many classes have are in `guards.py`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from swapd.shared.system import process_lock
from swapd_client.offload import copies, guards, private, weights
from swapd_client.offload.copies import Run


def _among(args: object, kwargs: object, kind: type) -> list[Any]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, kind)]


def _write(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with guards.writable(*_among(args, kwargs, Module | torch.Tensor)):  # type: ignore[arg-type]
        return function(*args, **kwargs)


def _write_held(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For functions that call the module's own parts, in grad mode too, and keep no graph."""
    modules = _among(args, kwargs, Module)
    with guards.writable(*modules), guards.held(modules[0]):
        return function(*args, **kwargs)


def _write_layers(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For functions that write to layers one by one, each by a function of its own."""
    modules = _among(args, kwargs, Module)
    with weights.edits(guards.owners(guards.covered(*modules))):
        return function(*args, **kwargs)


def _write_adapters(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For functions that write to adapters, and not to the layers under them."""
    layers = [m for model in _among(args, kwargs, Module) for m in model.modules()]
    adapters = [
        child
        for layer in layers
        if "base_layer" in layer._modules
        for name, child in layer.named_children()
        if name != "base_layer"
    ]
    with guards.writable(*adapters):
        return function(*args, **kwargs)


def _copy(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given: list[Any] = [*args, *kwargs.values()]
    tensor, memo = given
    if id(tensor) not in memo and (owner := guards.owner_of(tensor)) is not None:
        memo[id(tensor)] = copies.private(tensor, owner.copies())
        return memo[id(tensor)]
    return function(*args, **kwargs)


#: Patterns of names, by module and class (with its subclasses) or "".
TOOLS: Mapping[tuple[str, str], Mapping[str, Run]] = {
    ("torch._tensor", "Tensor"): {"__deepcopy__": _copy},
    ("torch.func", ""): {"stack_module_state": _write},  # it reads them
    ("torch.nn.init", ""): {"*_": _write},
    ("torch.nn.utils.fusion", ""): {"fuse_*_weights": _write},
    ("torch.nn.utils.parametrizations", ""): {"spectral_norm": _write, "orthogonal": _write},
    ("torch.nn.utils.parametrize", ""): {"re*_parametrization*": _write_held},
    ("torch.nn.utils.prune", ""): {"global_unstructured": _write},
    ("torch.nn.utils.prune", "BasePruningMethod"): {"apply": _write, "remove": _write},
    ("torch.nn.utils.spectral_norm", "SpectralNorm"): {"apply": _write, "remove": _write},
    ("torch.nn.utils.weight_norm", "WeightNorm"): {"apply": _write, "remove": _write},
    ("torch.optim.swa_utils", "AveragedModel"): {"update_parameters": _write},
    # merged into layers, or made from them: PiSSA, DoRA, LoftQ...
    ("peft.tuners.tuners_utils", "BaseTunerLayer"): dict.fromkeys(
        ("merge", "unmerge", "*_init"), _write
    ),
    ("peft.tuners.lora.dora", "DoraLinearLayer"): {"update_layer": _write},
    ("peft.tuners.tuners_utils", "BaseTuner"): {
        **dict.fromkeys(
            ("inject_adapter", "merge_adapter", "unmerge_adapter", "merge_and_unload"),
            _write_layers,
        ),
        "add_weighted_adapter": _write_adapters,
    },
    ("peft.utils.hotswap", ""): {"hotswap_adapter_from_state_dict": _write_adapters},
}

_lock = process_lock()
#: Put functions back, and remove torch's hook. Each may be called twice.
_to_undo: list[Callable[[], None]] = []
#: Keys of `TOOLS` whose libraries are not imported yet.
_missing: list[tuple[str, str]] = []
_is_watching = False


def watch() -> None:
    global _is_watching
    with _lock:
        if not _is_watching:
            _is_watching = True
            _to_undo.append(register_optimizer_step_pre_hook(private.refuse_step).remove)
            _missing[:] = TOOLS
        _replace()


def rest() -> None:
    global _is_watching
    with _lock:
        if not guards.is_any():
            _is_watching = False
            _missing.clear()
            while _to_undo:
                _to_undo[-1]()
                _to_undo.pop()


def look() -> None:
    if any(module in sys.modules for module, _ in _missing):
        with _lock:
            _replace()


def _replace() -> None:
    for key in list(_missing):
        library = sys.modules.get(key[0].partition(".")[0])
        if library is None or getattr(library.__spec__, "_initializing", False):
            continue  # it is imported later, or right now
        _missing.remove(key)
        for place in _places(*key):
            for pattern, runs in TOOLS[key].items():
                for found in [name for name in vars(place) if fnmatchcase(name, pattern)]:
                    _replace_one(place, found, runs)


def _places(name: str, kind: str) -> list[Any]:
    try:
        module: Any = import_module(name)
        return list(_subclasses(getattr(module, kind))) if kind else [module]
    except (ImportError, AttributeError):
        return []


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield from _subclasses(one)


def _replace_one(place: Any, name: str, runs: Run) -> None:
    given = vars(place)[name]
    function = given.__func__ if isinstance(given, (classmethod, staticmethod)) else given
    if not callable(function):
        return

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return runs(function, args, kwargs)

    _to_undo.append(partial(setattr, place, name, given))  # first: an interrupt may come in between
    setattr(place, name, run if function is given else type(given)(run))
