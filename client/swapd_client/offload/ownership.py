"""Finds the components that own each tensor. Does not talk to the daemon or change the model."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch.nn import Module, Parameter

from swapd_client.errors import InvalidSource
from swapd_client.memory import ranges
from swapd_client.memory.movable import UNINITIALISED, extent, leaves
from swapd_client.memory.part import Part as RegisteredPart
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.search import ComponentModule, is_called, join, modules_of, walk


@dataclass(eq=False)
class TensorGroup:
    """Tensors to register as one component: a component's own, or tensors that several share."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nbytes: int = 0


Part = TensorGroup | str
#: An ordered set.
Parts = dict[Part, None]


@dataclass
class Ownership:
    pieces: dict[str, TensorGroup] = field(default_factory=dict)
    made_of: dict[str, Parts] = field(default_factory=dict)
    #: Modules that use tensors of components without being in exactly one, and what they need.
    outside: dict[Module, Parts] = field(default_factory=dict)
    #: Bytes of the parameters in no component, by path.
    left: dict[str, int] = field(default_factory=dict)
    #: Bytes of parameters that stay private although they are in components.
    trained_bytes: int = 0


class _Owners:
    def __init__(self, roots: Mapping[str, Module], found: Sequence[ComponentModule]) -> None:
        self.modules = modules_of(roots)
        self.paths: dict[int, str] = {}
        for path, module in self.modules.items():
            self.paths.setdefault(id(module), path)
        starts = {id(one.module) for one in found}
        self.of: dict[int, list[str]] = {}
        for one in found:
            for module in walk(one.module, starts):
                self.of.setdefault(id(module), []).append(one.name)


def own(
    roots: Mapping[str, Module],
    found: Sequence[ComponentModule],
    *,
    extra: Mapping[str, torch.Tensor],
    client: AttachClient,
    trained: Collection[int] = (),
    serves_rest: bool = False,
) -> Ownership:
    """Find the owners of each tensor: an inner component comes before an outer one.

    Tensors whose bytes overlap stay together; if several components use them, or a module in no
    component does, they become a piece of their own. `extra`: tensors that are no parameters, by
    path. Tensors in components of `client` stay there. `trained`: ids of parameters that stay
    private, with all tensors that share their bytes. `serves_rest`: modules in no component may be
    called like those in one, so what they have of a component, or family, of `client` that is used
    here is loaded for them. Raises: InvalidSource.
    """
    owners = _Owners(roots, found)
    result = Ownership(made_of={one.name: {} for one in found})
    inside = {one.name: "" if one.whole else f"{one.name}." for one in found}
    rest: list[tuple[RegisteredPart | None, list[_OwnedTensor]]] = []
    for cluster in _clusters(_tensors(owners, extra, trained)):
        there = part_at(client, cluster[0].tensor)
        if not any(one.users for one in cluster):  # in no component
            rest.append((there, cluster))
            continue
        if there is None and any(one.stays for one in cluster):
            result.trained_bytes += _nbytes(cluster)
            continue
        part = there.name if there else _piece(cluster, result, owners, inside)
        _use(part, cluster, result, owners)
    used = _registered_in(result, client) if serves_rest else set()
    for there, cluster in rest:
        if there is not None and _with_family(there) in used:
            _use(there.name, cluster, result, owners)
        else:
            result.left[cluster[0].path] = _nbytes(cluster)
    for piece in result.pieces.values():
        _check(piece, inside.get(piece.name, ""))
    return result


def _registered_in(result: Ownership, client: AttachClient) -> set[str]:
    """Return the components and families of `client` that components are made of."""
    names = {part for parts in result.made_of.values() for part in parts if isinstance(part, str)}
    return {_with_family(client.session.own(name)) for name in names}


def _with_family(part: RegisteredPart) -> str:
    return part.part_of or part.name


def _piece(
    cluster: "Sequence[_OwnedTensor]",
    result: Ownership,
    owners: "_Owners",
    inside: Mapping[str, str],
) -> TensorGroup:
    users = dict.fromkeys(user for one in cluster for user in one.users)
    holders = dict.fromkeys(owners.paths[id(one.holder)] for one in cluster if not one.users)
    name = _joined([*users, *holders])
    piece = result.pieces.setdefault(name, TensorGroup(name))
    # names as in the state dict of the component, or if shared, of the model
    prefix = inside.get(name, "")
    own = (one for one in cluster if one.path.startswith(prefix))
    piece.tensors.update((one.path.removeprefix(prefix), one.tensor) for one in own)
    piece.nbytes += _nbytes(cluster)
    return piece


#: The daemon has a limit, and a prefix may come before the name.
_NAME_MAX_CHARS = 100


def _joined(names: Sequence[str]) -> str:
    """Return the name of what these share, the same in each process; short if dozens share it."""
    name = "+".join(names)
    if len(names) == 1 or len(name) <= _NAME_MAX_CHARS:
        return name
    return f"{name[:_NAME_MAX_CHARS]}...{blake2b(name.encode(), digest_size=4).hexdigest()}"


def _use(
    part: Part, cluster: "Sequence[_OwnedTensor]", result: Ownership, owners: "_Owners"
) -> None:
    for one in cluster:
        for user in one.users:
            result.made_of[user][part] = None
        outside = [] if one.users else [_called(one.holder, owners)]
        if len(one.users) > 1:
            outside += _above(one, owners)
        for module in outside:
            result.outside.setdefault(module, {})[part] = None


@dataclass(frozen=True)
class _OwnedTensor:
    path: str
    tensor: torch.Tensor
    #: The components around it; empty if only `holder` has it.
    users: tuple[str, ...]
    holder: Module
    stays: bool = False


def _tensors(
    owners: _Owners, extra: Mapping[str, torch.Tensor], trained: Collection[int]
) -> Iterator[_OwnedTensor]:
    for path, module in owners.modules.items():
        users = tuple(owners.of.get(id(module), ()))
        for own_name, parameter in own_parameters(module):
            for name, tensor in leaves(join(path, own_name), parameter):
                yield _OwnedTensor(name, tensor, users, module, id(parameter) in trained)
    for path, given in extra.items():
        holder = next(owners.modules[p] for p in _upwards(path) if p in owners.modules)
        for name, tensor in leaves(path, given):
            yield _OwnedTensor(name, tensor, tuple(owners.of.get(id(holder), ())), holder)


def own_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    return ((name, p) for name, p in module._parameters.items() if p is not None)


def bytes_of(modules: Iterable[Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for name, parameter in own_parameters(module):
            yield from (tensor for _, tensor in leaves(name, parameter))


def by_block(
    piece: TensorGroup, component: Module, blocks: Sequence[Sequence[Module]], stops: Iterable[int]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the piece's tensors used outside the blocks or in several, and those of each block."""
    users = _blocks_that_use(component, blocks, set(stops))
    rest: dict[str, torch.Tensor] = {}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in blocks]
    nobody = Module()
    for cluster in _clusters(_OwnedTensor(p, t, (), nobody) for p, t in piece.tensors.items()):
        numbers = set[int]().union(*(users.get(id(one.tensor), {_REST}) for one in cluster))
        target = rest if len(numbers) > 1 or _REST in numbers else parts[numbers.pop()]
        target.update({one.path: one.tensor for one in cluster})
    return rest, parts


def _blocks_that_use(
    component: Module, blocks: Sequence[Sequence[Module]], stops: set[int]
) -> dict[int, set[int]]:
    users: dict[int, set[int]] = {}
    within = {id(module) for modules in blocks for module in modules}
    for tensor in bytes_of(walk(component, within | stops)):
        users[id(tensor)] = {_REST}
    for number, modules in enumerate(blocks):
        inside = {id(m): m for module in modules for m in walk(module, stops)}
        for tensor in bytes_of(inside.values()):
            users.setdefault(id(tensor), set()).add(number)
    return users


#: In place of a block's number: outside the blocks.
_REST = -1


def _upwards(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _above(one: _OwnedTensor, owners: _Owners) -> Iterator[Module]:
    for path in _upwards(one.path):
        module = owners.modules.get(path)
        if module is not None and set(owners.of.get(id(module), ())) == set(one.users):
            yield module


def _called(holder: Module, owners: _Owners) -> Module:
    paths = filter(owners.modules.__contains__, _upwards(owners.paths[id(holder)]))
    above = ((path, owners.modules[path]) for path in paths)
    return next((module for path, module in above if not path or is_called(module)), holder)


def components_at(tensors: Iterable[torch.Tensor]) -> Iterator[ranges.RegisteredRange]:
    """Yield the components, of any client, that contain these tensors."""
    for _, one in chain.from_iterable(leaves("", tensor) for tensor in tensors):
        if (found := ranges.find(*extent(one))) is not None:
            yield found


def part_at(client: AttachClient, tensor: torch.Tensor) -> RegisteredPart | None:
    found = ranges.find(*extent(tensor))
    part = None if found is None else found.part
    known = part is not None and client.session.components.get(part.name) is part
    return part if known else None


def _clusters(tensors: Iterable[_OwnedTensor]) -> Iterator[list[_OwnedTensor]]:
    """Group tensors whose bytes overlap, in the order of their first tensors.

    So replicas, whose addresses differ, get the same order. A tensor without bytes is alone.
    """
    clusters: dict[int, list[_OwnedTensor]] = {}
    placed: list[tuple[int, int, int, _OwnedTensor]] = []
    for number, one in enumerate(tensors):
        start, nbytes = extent(one.tensor)
        if nbytes:
            placed.append((start, nbytes, number, one))
        else:
            clusters[number] = [one]
    placed.sort(key=lambda item: item[:3])
    first, end, cluster = 0, 0, list[_OwnedTensor]()
    for start, nbytes, number, one in placed:
        if start >= end:
            first, cluster = number, []
        cluster.append(one)
        clusters.pop(first, None)
        first = min(first, number)
        clusters[first] = cluster
        end = max(end, start + nbytes)
    return (clusters[number] for number in sorted(clusters))


def _nbytes(cluster: Sequence[_OwnedTensor]) -> int:
    spans = [extent(one.tensor) for one in cluster]
    return max(start + nbytes for start, nbytes in spans) - min(start for start, _ in spans)


# --- tensors that are no parameters ------------------------------------------------------


def plain_tensors(
    roots: Mapping[str, Module], found: Sequence[ComponentModule]
) -> dict[str, torch.Tensor]:
    """Return tensors of components that are plain attributes, or in lists and dicts, by path."""
    owners = _Owners(roots, found)
    known = {
        id(tensor)
        for module in owners.modules.values()
        for tensor in (*module._parameters.values(), *module._buffers.values())
    }
    known.update(owners.paths)  # modules
    plain: dict[str, torch.Tensor] = {}
    for path, module in owners.modules.items():
        if id(module) not in owners.of:
            continue
        for name, value in module.__dict__.items():
            if name not in _TORCHS_OWN:
                _collect(join(path, name), value, known, plain)
    return plain


_TORCHS_OWN = frozenset(Module().__dict__)


def _collect(path: str, value: Any, known: set[int], plain: dict[str, torch.Tensor]) -> None:
    if not isinstance(value, (torch.Tensor, Module, list, tuple, dict)) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        plain[path] = value
    elif isinstance(value, Module):
        for name, tensor in value.named_parameters():
            _collect(join(path, name), tensor, known, plain)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _collect(f"{path}.{key}", item, known, plain)


def _check(piece: TensorGroup, start: str) -> None:
    places: dict[torch.device, str] = {}
    for name, tensor in piece.tensors.items():
        path = f"{start}{name}"
        if isinstance(tensor, UNINITIALISED):
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
        raise InvalidSource(
            f"{piece.name!r} is on two devices, {said}: one lease cannot cover both"
        )
