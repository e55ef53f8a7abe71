"""Finds the components that a caller names. Does not talk to the daemon or change the model.

A model is a module, a pipeline (an object with `components`, or a `model`), or a mapping of names
to modules.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList

from swapd_client.errors import InvalidSource
from swapd_client.offload import automatic
from swapd_client.offload.automatic import CONTAINERS

_T = TypeVar("_T")

#: Classes of torch.distributed.fsdp, whose import is slow.
_SHARDS = ("FSDPModule", "FullyShardedDataParallel")


@dataclass(frozen=True)
class ComponentModule:
    name: str
    module: Module
    #: The component is the whole model, and is named like its class.
    whole: bool = False


# --- the model ---------------------------------------------------------------------------


def roots_of(model: object) -> dict[str, Module]:
    """Return the modules of a model by name; "" for a single module. Raises: InvalidSource."""
    if isinstance(model, Module):
        return {"": model}
    named: object = getattr(model, "components", None)
    if isinstance(model, Mapping):
        for name, module in model.items():
            _refuse_other(name, module)
        named = model
    elif not isinstance(named, Mapping):
        named = _around_a_model(model)
    if not isinstance(named, Mapping):
        raise InvalidSource(
            f"cannot attach to a {type(model).__name__}: give a module, a pipeline that has "
            "`components` or a `model`, or a dict of names and modules"
        )
    roots = {name: module for name, module in named.items() if isinstance(module, Module)}
    if not roots:
        raise InvalidSource(f"there is no module in this {type(model).__name__}")
    return roots


def _refuse_other(name: object, module: object) -> None:
    if not isinstance(module, Module):
        raise InvalidSource(f"{name!r} is a {type(module).__name__}, not a module")
    if not isinstance(name, str):
        raise InvalidSource(f"the name of a module is {name!r}: give a text")


def _around_a_model(model: object) -> Mapping[str, Module] | None:
    if not isinstance(getattr(model, "model", None), Module):
        return None
    modules = {n: m for n, m in vars(model).items() if isinstance(m, Module)}
    return modules if len(modules) > 1 else {"": model.model}  # type: ignore[attr-defined]


def modules_of(roots: Mapping[str, Module]) -> dict[str, Module]:
    return {
        join(name, path): module
        for name, root in roots.items()
        for path, module in root.named_modules(remove_duplicate=False)
    }


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# --- which are components ----------------------------------------------------------------


def components_of(
    roots: Mapping[str, Module], wanted: Sequence[str] | None
) -> list[ComponentModule]:
    """Return the components that `wanted` names, by path or pattern; "." is the whole model.

    A path that begins with a usual name may be anywhere. Without `wanted`, `automatic.py` chooses.
    Raises: InvalidSource, naming the modules there are.
    """
    modules = modules_of(roots)
    if wanted is None:
        found = [one for name, root in roots.items() for one in _automatic(name, root)]
    else:
        found = [one for name in wanted for one in _named(name, roots, modules)]
    by_module: dict[int, ComponentModule] = {}
    for one in found:
        by_module.setdefault(id(one.module), one)
    return list(by_module.values())


def _automatic(name: str, root: Module) -> Iterable[ComponentModule]:
    parts = {} if name in automatic.NAMES else automatic.parts_of(root)
    if not automatic.has_usual(parts) and compiled_around(root, parts.values()) is not None:
        parts = {}  # compiled as one, it can only be attached as a whole
    if not parts:
        return _whole(name, root)
    return [ComponentModule(join(name, path), module) for path, module in parts.items()]


def _whole(name: str, root: Module) -> list[ComponentModule]:
    if isinstance(root, CONTAINERS) and type(root).forward is Module.forward:
        return list(_callable(name, root)) or [_never_called(name, root)]
    return [ComponentModule(name or type(bare(root)).__name__, root, whole=not name)]


def _never_called(name: str, module: Module) -> ComponentModule:
    raise InvalidSource(
        f"{repr(name) if name else 'this'} is a {type(module).__name__}, which nobody calls: no "
        "hook could load it. Attach the module that reads it; or client.register it, and "
        "acquire it"
    )


def _named(
    name: str, roots: Mapping[str, Module], modules: Mapping[str, Module]
) -> Iterable[ComponentModule]:
    if name == ".":
        return [found for key, root in roots.items() for found in _whole(key, root)]
    matches = matching(name, {path: module for path, module in modules.items() if path})
    if not matches and name.partition(".")[0] in automatic.NAMES:  # at any depth
        matches = matching(f"*.{name}", modules)
    if not matches:
        raise InvalidSource(f"no module is called, or matches, {name!r}; {_listed(modules)}")
    return list(_outermost(matches)) or [_never_called(*next(iter(matches.items())))]


def matching(name: str, named: Mapping[str, _T]) -> dict[str, _T]:
    return {n: one for n, one in named.items() if n == name or fnmatchcase(n, name)}


def _listed(modules: Mapping[str, Module], limit: int = 40) -> str:
    paths = sorted((p for p in modules if p), key=lambda path: path.count("."))
    more = f", and {len(paths) - limit} more" if len(paths) > limit else ""
    return f"there are: {', '.join(paths[:limit])}{more}" if paths else "there are none"


def _outermost(matches: Mapping[str, Module]) -> Iterator[ComponentModule]:
    """Yield the matches inside no other match, or the children of one that torch never calls."""
    done: list[str] = []
    for path in sorted(matches, key=lambda p: p.count(".")):
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        done.append(path)
        yield from _callable(path, matches[path])


def _callable(path: str, module: Module) -> Iterator[ComponentModule]:
    if isinstance(module, (ModuleList, ModuleDict)):
        for name, child in module.named_children():
            yield from _callable(join(path, name), child)
    elif not isinstance(module, (ParameterList, ParameterDict)):
        yield ComponentModule(path, module)


def is_called(module: Module) -> bool:
    """Whether torch calls the module. If not, the module around it calls or reads its contents."""
    none = getattr(module.forward, "__func__", None) is Module.forward
    return not none and not isinstance(module, CONTAINERS)


def bare(module: Module) -> Module:
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def compiled_around(root: Module, modules: Iterable[Module]) -> Module | None:
    """Return a module compiled as one around any of `modules`, whose hooks may not run there."""
    inner = {id(module) for module in modules}
    for outer in root.modules():
        compiled = bare(outer) is not outer or outer._compiled_call_impl is not None
        if compiled and any(id(one) in inner for one in outer.modules() if one is not outer):
            return outer
    return None


def walk(root: Module, stops: Iterable[int] = ()) -> Iterator[Module]:
    """Yield `root` and all modules in it, but not `stops` and their contents."""
    seen = {id(root)}.union(stops)
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in children(module, seen):
            seen.add(id(child))
            waiting.append(child)


def children(module: Module, but: Container[int] = ()) -> list[Module]:
    return [child for child in module.children() if id(child) not in but]


# --- what cannot be attached -------------------------------------------------------------


def refuse_hooked(roots: Mapping[str, Module]) -> None:
    for path, module in modules_of(roots).items():
        where = path or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidSource(
                f"{where!r} is scripted or traced (torch.jit), and runs without the hooks that "
                "would load its weights: attach the module that it was made from"
            )
        if any(kind.__name__ in _SHARDS for kind in type(module).__mro__):
            raise InvalidSource(
                f"{where!r} is sharded by FSDP, which gathers its weights from memory of its own: "
                "load it without; tensor parallel modules (DTensor) can be attached"
            )
        if hook := module.__dict__.get("_hf_hook"):
            raise InvalidSource(
                f"{where!r} has `_hf_hook`, a {type(hook).__name__} of accelerate, which moves its "
                "weights too: load without device_map and offloading, or remove it with "
                "pipeline.remove_all_hooks() or accelerate.hooks.remove_hook_from_module(module, "
                "recurse=True)"
            )
        registry = module.__dict__.get("_diffusers_hook")
        for kind in getattr(registry, "hooks", ()):
            if "offload" in kind or "casting" in kind:
                raise InvalidSource(
                    f"{where!r} has `_diffusers_hook` with {kind!r}, which moves its weights too: "
                    "load without it"
                )


def refuse_compiled(roots: Mapping[str, Module], found: Sequence[ComponentModule]) -> None:
    """Raise for a component in a compiled module: compiled code does not see new hooks."""
    for root in roots.values():
        for one in found:
            if (outer := compiled_around(root, [one.module])) is not None:
                raise InvalidSource(
                    f"{one.name!r} is in a {type(bare(outer)).__name__} that is compiled as one, "
                    "and would run there without its hooks: attach the whole model "
                    "(components='.'), or compile the components instead"
                )
