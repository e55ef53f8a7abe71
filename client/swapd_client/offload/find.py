"""Finds the components of a model, and the owners of each tensor.

A model is a module, a pipeline (an object with `components`, or a `model`), or a mapping of names
to modules. Lives here: names, patterns, nested components, shared tensors; detection without names
is in `automatic.py`. Nothing here talks to the daemon or changes the model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from swapd_client.errors import InvalidSource
from swapd_client.memory.tensors import inner_names, is_wrapper
from swapd_client.offload import automatic
from swapd_client.offload.automatic import CONTAINERS as CONTAINERS

_UNINITIALISED = (UninitializedParameter, UninitializedBuffer)

#: Classes of torch.distributed.fsdp, whose import is slow.
_SHARDS = ("FSDPModule", "FullyShardedDataParallel")

#: (first byte, first byte after it)
Span = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """A module that is a component, under its name in the model."""

    name: str
    module: Module
    #: The component is the whole model; its name is that of the class.
    whole: bool = False


@dataclass(eq=False)
class Piece:
    """Tensors to register as one component: a component's own, or tensors that several share."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nbytes: int = 0


#: A piece, or the name of a registered component.
Part = Piece | str


@dataclass
class Ownership:
    """The owners of each tensor."""

    #: To be registered, by name.
    pieces: dict[str, Piece] = field(default_factory=dict)
    #: All parts of each component.
    made_of: dict[str, list[Part]] = field(default_factory=dict)
    #: Modules that use tensors of components without being in exactly one, and the parts they need.
    outside: dict[Module, list[Part]] = field(default_factory=dict)
    #: Bytes of the parameters in no component, by path.
    left: dict[str, int] = field(default_factory=dict)
    #: Bytes of the parameters in components that stay private.
    trained_bytes: int = 0


# --- the model ---------------------------------------------------------------------------


def roots_of(model: object) -> dict[str, Module]:
    """A model's modules by name; a single module's name is empty. Raises: InvalidSource."""
    if isinstance(model, Module):
        return {"": model}
    named = model if isinstance(model, Mapping) else getattr(model, "components", None)
    if not isinstance(named, Mapping):
        named = _around_a_model(model)
    if not isinstance(named, Mapping):
        raise InvalidSource(
            f"cannot attach to a {type(model).__name__}: give a module, a pipeline that has "
            "`components` or a `model`, or a dict of names and modules"
        )
    if isinstance(model, Mapping):
        for name, module in named.items():
            if not isinstance(module, Module):
                raise InvalidSource(f"{name!r} is a {type(module).__name__}, not a module")
    roots = {name: module for name, module in named.items() if isinstance(module, Module)}
    if not roots:
        raise InvalidSource(f"there is no module in this {type(model).__name__}")
    return roots


def _around_a_model(model: object) -> Mapping[str, Module] | None:
    """The modules of an object with a `model`, as in transformers' pipelines."""
    if not isinstance(getattr(model, "model", None), Module):
        return None
    modules = {n: m for n, m in vars(model).items() if isinstance(m, Module)}
    return modules if len(modules) > 1 else {"": model.model}  # type: ignore[attr-defined]


def modules_of(roots: Mapping[str, Module]) -> dict[str, Module]:
    """All modules by path; one with two paths under both."""
    return {
        _join(name, path): module
        for name, root in roots.items()
        for path, module in root.named_modules(remove_duplicate=False)
    }


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# --- which are components ----------------------------------------------------------------


def components_of(roots: Mapping[str, Module], wanted: Sequence[str] | None) -> list[Found]:
    """The components that `wanted` names, by path or pattern; "." is the whole model.

    A path may begin with a usual name, at any depth. Without `wanted`, as in `automatic.py`.

    Raises: InvalidSource, naming the modules there are.
    """
    modules = modules_of(roots)
    if wanted is None:
        found = [one for name, root in roots.items() for one in _automatic(name, root)]
    else:
        found = [one for name in wanted for one in _named(name, roots, modules)]
    by_module: dict[int, Found] = {}
    for one in found:
        by_module.setdefault(id(one.module), one)
    return list(by_module.values())


def _automatic(name: str, root: Module) -> Iterable[Found]:
    parts = {} if name in automatic.NAMES else automatic.parts_of(root)
    if not automatic.has_usual(parts) and compiled_around(root, parts.values()) is not None:
        parts = {}  # compiled as one, it can be attached as a whole, but not in parts
    if not parts:
        return _whole({name: root})
    return [Found(_join(name, path), module) for path, module in parts.items()]


def _whole(roots: Mapping[str, Module]) -> list[Found]:
    return [found for name, root in roots.items() for found in _whole_root(name, root)]


def _whole_root(name: str, root: Module) -> list[Found]:
    if isinstance(root, CONTAINERS) and type(root).forward is Module.forward:
        return list(_callable(name, root)) or [_never_called(name, root)]
    return [Found(name or type(bare(root)).__name__, root, whole=not name)]


def _never_called(name: str, module: Module) -> Found:
    raise InvalidSource(
        f"{repr(name) if name else 'this'} is a {type(module).__name__}, which nobody calls: no "
        "hook could load it. Attach the module that reads it; or client.register it, and "
        "acquire it"
    )


def _named(
    name: str, roots: Mapping[str, Module], modules: Mapping[str, Module]
) -> Iterable[Found]:
    if name == ".":
        return _whole(roots)
    matches = {p: m for p, m in modules.items() if p and (p == name or fnmatchcase(p, name))}
    if not matches and name.partition(".")[0] in automatic.NAMES:  # at any depth
        matches = {p: m for p, m in modules.items() if fnmatchcase(p, f"*.{name}")}
    if not matches:
        raise InvalidSource(f"no module is called, or matches, {name!r}; {_listed(modules)}")
    return list(_outermost(matches)) or [_never_called(*next(iter(matches.items())))]


def _listed(modules: Mapping[str, Module], limit: int = 40) -> str:
    """The paths there are, outermost first, up to `limit`."""
    paths = sorted((p for p in modules if p), key=lambda path: path.count("."))
    more = f", and {len(paths) - limit} more" if len(paths) > limit else ""
    return f"there are: {', '.join(paths[:limit])}{more}" if paths else "there are none"


def _outermost(matches: Mapping[str, Module]) -> Iterator[Found]:
    """Matches inside no other match; a module that torch never calls stands for its children."""
    done: list[str] = []
    for path in sorted(matches, key=lambda p: p.count(".")):
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        done.append(path)
        yield from _callable(path, matches[path])


def _callable(path: str, module: Module) -> Iterator[Found]:
    if isinstance(module, (ModuleList, ModuleDict)):
        for name, child in module.named_children():
            yield from _callable(_join(path, name), child)
    elif not isinstance(module, (ParameterList, ParameterDict)):
        yield Found(path, module)


def is_called(module: Module) -> bool:
    """Whether torch calls it. Otherwise the module around it calls, or reads, its contents."""
    none = getattr(module.forward, "__func__", None) is Module.forward
    return not none and not isinstance(module, CONTAINERS)


def bare(module: Module) -> Module:
    """The original of a compiled module; any other module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def compiled_around(root: Module, modules: Iterable[Module]) -> Module | None:
    """A module compiled as one around any of `modules`, whose hooks may not run there."""
    inner = {id(module) for module in modules}
    for outer in root.modules():
        compiled = bare(outer) is not outer or outer._compiled_call_impl is not None
        if compiled and any(id(one) in inner for one in outer.modules() if one is not outer):
            return outer
    return None


# --- what cannot be attached -------------------------------------------------------------


def refuse_hooked(roots: Mapping[str, Module]) -> None:
    """Raise for a module that another offloader moves."""
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


def refuse_compiled(roots: Mapping[str, Module], found: Sequence[Found]) -> None:
    """Raise for components inside a compiled module: compiled code does not see new hooks."""
    for root in roots.values():
        for one in found:
            if (outer := compiled_around(root, [one.module])) is not None:
                raise InvalidSource(
                    f"{one.name!r} is in a {type(bare(outer)).__name__} that is compiled as one, "
                    "and would run there without its hooks: attach the whole model "
                    "(components='.'), or compile the components instead"
                )


def _check(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for a component without bytes, or with bytes on two devices."""
    places: dict[torch.device, str] = {}
    for path, tensor in tensors.items():
        if isinstance(tensor, _UNINITIALISED):
            raise InvalidSource(
                f"{path!r} is not initialised: run the model once, or have it made by client.load"
            )
        if tensor.is_meta:
            raise InvalidSource(
                f"{path!r} is on the meta device and has no bytes: client.load puts a file's "
                "weights into swapd and builds the module over them"
            )
        if tensor.numel():
            places.setdefault(tensor.device, path)
    if len(places) > 1:
        said = " and ".join(f"{path!r} on {device}" for device, path in places.items())
        raise InvalidSource(f"{name!r} is on two devices, {said}: one lease cannot cover both")


# --- ownership ---------------------------------------------------------------------------


class _Owners:
    """The components that use each module, as far as they reach."""

    def __init__(self, roots: Mapping[str, Module], found: Sequence[Found]) -> None:
        self.modules = modules_of(roots)
        self.paths: dict[int, str] = {}
        for path, module in self.modules.items():
            self.paths.setdefault(id(module), path)
        starts = {id(one.module) for one in found}
        #: The components that a module is in, by its id.
        self.of: dict[int, list[str]] = {}
        for one in found:
            for module in walk(one.module, starts):
                self.of.setdefault(id(module), []).append(one.name)
        #: Modules that a caller outside of the components calls.
        self.outside = {
            id(module): module
            for root in roots.values()
            if id(root) not in starts
            for module in walk(root, starts)
        }


def walk(root: Module, stops: Iterable[int] = ()) -> Iterator[Module]:
    """`root` and the modules in it, each once, except `stops` and their contents."""
    seen = {id(root)}.union(stops)
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def own(
    roots: Mapping[str, Module],
    found: Sequence[Found],
    *,
    extra: Mapping[str, torch.Tensor],
    registered: Mapping[str, Span],
    trained: Collection[int] = (),
) -> Ownership:
    """Find the owners of each tensor: an inner component comes before an outer one.

    Tensors whose bytes overlap stay together. If several components use them, or a module in no
    component does, they become a piece of their own. `extra`: tensors that are no parameters, by
    path. `registered`: the addresses of components there are. `trained`: parameters, by id, that
    stay private together with all tensors that share their bytes. Raises: InvalidSource.
    """
    owners = _Owners(roots, found)
    inside = {one.name: "" if one.whole else f"{one.name}." for one in found}
    result = Ownership(made_of={one.name: [] for one in found})
    for cluster in _clusters(_tensors(owners, extra, trained)):
        users = list(dict.fromkeys(user for one in cluster for user in one.users))
        holders = [one.holder for one in cluster if not one.users]
        if not users:
            result.left[cluster[0].path] = _nbytes(cluster)
            continue
        part: Part | None = _place(cluster, registered)
        if part is None and any(one.stays for one in cluster):
            result.trained_bytes += _nbytes(cluster)
            continue
        if part is None:
            labels = [*users, *dict.fromkeys(owners.paths[id(holder)] for holder in holders)]
            name = "+".join(labels)
            part = result.pieces.setdefault(name, Piece(name))
            part.tensors.update(_called_in(cluster, inside.get(name)))
            part.nbytes += _nbytes(cluster)
        for user in users:
            _add(result.made_of[user], part)
        for holder in holders:
            _add(result.outside.setdefault(_called(holder, owners), []), part)
        for one in cluster:
            if len(one.users) > 1:
                for module in _above(one, owners):
                    _add(result.outside.setdefault(module, []), part)
    for piece in result.pieces.values():
        start = inside.get(piece.name, "")
        _check(piece.name, {f"{start}{path}": tensor for path, tensor in piece.tensors.items()})
    return result


def _add(parts: list[Part], part: Part) -> None:
    if part not in parts:
        parts.append(part)


@dataclass(frozen=True)
class _Tensor:
    path: str
    tensor: torch.Tensor
    #: The components around it; if none, only `holder` has it.
    users: tuple[str, ...]
    holder: Module
    #: It stays private.
    stays: bool = False


def _called_in(cluster: Sequence[_Tensor], prefix: str | None) -> dict[str, torch.Tensor]:
    """Tensors by name: as in the component's own state dict; if shared, as in the model's."""
    if prefix is None:
        return {one.path: one.tensor for one in cluster}
    return {
        one.path.removeprefix(prefix): one.tensor for one in cluster if one.path.startswith(prefix)
    }


def _tensors(
    owners: _Owners, extra: Mapping[str, torch.Tensor], trained: Collection[int]
) -> Iterator[_Tensor]:
    """Every parameter and extra tensor, under each of its names."""
    for path, module in owners.modules.items():
        users = tuple(owners.of.get(id(module), ()))
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            for name, tensor in _unwrapped(_join(path, own_name), parameter):
                yield _Tensor(name, tensor, users, module, id(parameter) in trained)
    for path, given in extra.items():
        holder = _holder(path, owners.modules)
        for name, tensor in _unwrapped(path, given):
            yield _Tensor(name, tensor, tuple(owners.of.get(id(holder), ())), holder)


def _unwrapped(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with bytes of their own: for a wrapper, its inner tensors."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for inner in inner_names(tensor):
        yield from _unwrapped(f"{name}.{inner}", getattr(tensor, inner))


def bytes_of(module: Module) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes of a module's own parameters."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield from (tensor for _, tensor in _unwrapped("", parameter))


def by_block(
    piece: Piece, component: Module, blocks: Sequence[Sequence[Module]], stops: Iterable[int]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Split a piece's tensors: those used outside the blocks or in several; and each block's."""
    users: dict[int, tuple[str, ...]] = {}
    within = {id(module) for modules in blocks for module in modules}
    for module in walk(component, within.union(stops)):
        for tensor in bytes_of(module):
            users[id(tensor)] = ("",)
    for number, modules in enumerate(blocks):
        inside = {id(m): m for module in modules for m in walk(module, stops)}
        for module in inside.values():
            for tensor in bytes_of(module):
                users[id(tensor)] = (*users.get(id(tensor), ()), str(number))
    rest: dict[str, torch.Tensor] = {}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in blocks]
    nobody = Module()
    tensors = [_Tensor(p, t, users.get(id(t), ()), nobody) for p, t in piece.tensors.items()]
    for cluster in _clusters(tensors):
        numbers = {number for one in cluster for number in one.users or ("",)}
        target = rest if len(numbers) > 1 or "" in numbers else parts[int(numbers.pop())]
        target.update({one.path: one.tensor for one in cluster})
    return rest, parts


def _holder(name: str, modules: Mapping[str, Module]) -> Module:
    path = name
    while path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


def _above(one: _Tensor, owners: _Owners) -> Iterator[Module]:
    """The modules around a tensor that are in the same components."""
    path = one.path
    while path:
        path = path.rpartition(".")[0]
        module = owners.modules.get(path)
        if module is not None and set(owners.of.get(id(module), ())) == set(one.users):
            yield module


def _called(holder: Module, owners: _Owners) -> Module:
    """The module whose forward uses `holder`'s tensors."""
    path = owners.paths[id(holder)]
    while path and not is_called(owners.modules[path]):
        path = path.rpartition(".")[0]
        if path not in owners.modules:
            break
    return owners.modules.get(path, holder)


def bytes_in(tensor: torch.Tensor) -> list[Span]:
    """Where the bytes of a tensor are; for a wrapper, of its inner tensors."""
    spans = [span_of(inner) for _, inner in _unwrapped("", tensor)]
    return [span for span in spans if span is not None]


def span_of(tensor: torch.Tensor) -> Span | None:
    """The bytes that a tensor covers; None if it has none, or none that can be located."""
    if isinstance(tensor, _UNINITIALISED) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _clusters(tensors: Iterable[_Tensor]) -> Iterator[list[_Tensor]]:
    """Group tensors whose bytes overlap; each without bytes is alone."""
    placed: list[tuple[Span, _Tensor]] = []
    for one in tensors:
        span = span_of(one.tensor)
        if span is None:
            yield [one]
        else:
            placed.append((span, one))
    placed.sort(key=lambda item: item[0])
    cluster: list[_Tensor] = []
    end = 0
    for (start, stop), one in placed:
        if cluster and start >= end:
            yield cluster
            cluster = []
        cluster.append(one)
        end = max(end, stop)
    if cluster:
        yield cluster


def _nbytes(cluster: Sequence[_Tensor]) -> int:
    spans = [span for one in cluster if (span := span_of(one.tensor))]
    return max(s[1] for s in spans) - min(s[0] for s in spans) if spans else 0


def _place(cluster: Sequence[_Tensor], registered: Mapping[str, Span]) -> str | None:
    """The registered component that has these bytes."""
    span = span_of(cluster[0].tensor)
    if span is None:
        return None
    for name, (start, end) in registered.items():
        if start <= span[0] < end:
            return name
    return None


# --- tensors that are no parameters ------------------------------------------------------


def plain_tensors(roots: Mapping[str, Module], found: Sequence[Found]) -> dict[str, torch.Tensor]:
    """Tensors of components that are attributes, or in lists and dicts: by path.

    Without parameters and buffers, and without other names of them.
    """
    owners = _Owners(roots, found)
    known = {id(t) for m in owners.modules.values() for t in (*_own_tensors(m),)}
    known.update(owners.paths)  # modules
    plain: dict[str, torch.Tensor] = {}
    for path, module in owners.modules.items():
        if id(module) not in owners.of:
            continue
        for name, value in module.__dict__.items():
            if name not in _TORCHS_OWN:
                _collect(_join(path, name), value, known, plain)
    return plain


def _own_tensors(module: Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


#: Attributes that every module has.
_TORCHS_OWN = frozenset(Module().__dict__)


def _collect(path: str, value: Any, known: set[int], plain: dict[str, torch.Tensor]) -> None:
    if not isinstance(value, (torch.Tensor, Module, list, tuple, dict)) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        plain[path] = value
    elif isinstance(value, Module):
        for name, tensor in value.named_parameters():
            _collect(_join(path, name), tensor, known, plain)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _collect(f"{path}.{key}", item, known, plain)
