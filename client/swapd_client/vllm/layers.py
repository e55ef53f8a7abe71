"""Divides a component into parts of neighbouring layers: a family, evicted part by part.

Tensors in no layer or in several (embeddings, head, norms, tied weights) are the part `rest`. All
parts are leased together, except layers that stream (`stage/window.py`): they are a family of their
own.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch.nn import Module

from swapd.shared import vm
from swapd.shared.protocol import REST
from swapd_client.errors import InvalidArgument
from swapd_client.memory.layout import ALIGN_BYTES
from swapd_client.memory.movable import leaves
from swapd_client.offload.blocks import lists_of
from swapd_client.offload.copies import start_of
from swapd_client.vllm.options import PART_CHUNKS, Options
from swapd_client.vllm.parts import StagePart, Tensors
from swapd_client.vllm.window_size import SLOTS, number_of, slots_of


def divide(
    parts: Collection[StagePart], models: Mapping[str, Module], chunk: int, room: int
) -> None:
    """Divide those components of a stage that take turns and are large enough.

    Nothing is divided if the parts, in whole chunks, do not fit into `room` bytes.
    """
    lists = _lists_of(models)
    divided = [part for part in parts if part.policy == "lru" and not part.encoder]
    for part in divided:
        part.layers = by_layers(part.tensors, lists, PART_CHUNKS * chunk)
    sources = chain.from_iterable(part.sources.values() for part in parts)
    if sum(vm.round_up(nbytes_of(tensors), chunk) for tensors in sources) > room:
        for part in divided:
            part.layers = {}


def by_layers(
    tensors: Tensors, lists: Iterable[Sequence[str]], least: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Divide `tensors` into parts of at least `least` bytes; the first is `rest`, of any size."""
    lists = list(map(tuple, lists))
    of_layer = _by_layer(tensors, set(chain.from_iterable(lists)))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for layers in lists:
        sizes = {layer: nbytes_of(of_layer[layer]) for layer in layers if layer in of_layer}
        for group in _grouped(sizes, least):
            found = (of_layer.pop(layer).items() for layer in group)
            parts[_called(group)] = dict(chain.from_iterable(found))
    if len(parts) < 2:
        return {}
    left = set(chain.from_iterable(of_layer.values()))
    rest = {name: tensor for name, tensor in tensors.items() if name in left}
    return {REST: rest, **parts} if rest else parts


def modules_of(models: Mapping[str, Module], part: str) -> list[Module]:
    path, _, numbers = part.rpartition(".")
    first, _, last = numbers.partition("-")
    key = next((key for key in models if key and path.startswith(f"{key}.")), "")
    listed = models[key].get_submodule(path.removeprefix(f"{key}."))
    inside = [name for name, _ in listed.named_children()]
    return [
        listed.get_submodule(name)
        for name in inside[inside.index(first) : inside.index(last or first) + 1]
    ]


def nbytes_of(tensors: Tensors) -> int:
    """Return an upper bound; each storage counts once."""
    stores = {start: n for one in tensors.values() for start, n in _stores(one)}
    return sum(vm.round_up(n, ALIGN_BYTES) for n in stores.values())


def _by_layer(tensors: Tensors, layers: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Under "" are tensors in no layer, and those that share memory with another layer's."""
    layer_of = {name: _around(name, layers) for name in tensors}
    stores = {name: {start for start, _ in _stores(one)} for name, one in tensors.items()}
    while shared := _shared(stores, layer_of):  # all tensors inside one wrapper stay together
        for name, starts in stores.items():
            if not shared.isdisjoint(starts):
                layer_of[name] = ""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, layer in layer_of.items():
        found[layer][name] = tensors[name]
    return found


def _shared(stores: Mapping[str, set[int]], layer_of: Mapping[str, str]) -> set[int]:
    users: dict[int, set[str]] = defaultdict(set)
    for name, starts in stores.items():
        for start in starts:
            users[start].add(layer_of[name])
    return {start for start, of in users.items() if len(of) > 1}


def _around(name: str, layers: Collection[str]) -> str:
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _stores(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    for _, one in leaves("", tensor):
        if start := start_of(one):
            yield start, one.untyped_storage().nbytes()


def _grouped(sizes: Mapping[str, int], least: int) -> list[list[str]]:
    groups: list[list[str]] = []
    group: list[str] = []
    for layer in sizes:
        group.append(layer)
        if sum(sizes[one] for one in group) >= least:
            groups.append(group)
            group = []
    if groups:
        groups[-1] += group
    return groups


def _called(group: Sequence[str]) -> str:
    first, last = group[0], group[-1].rpartition(".")[2]
    return first if len(group) == 1 else f"{first}-{last}"


def _lists_of(models: Mapping[str, Module]) -> list[tuple[str, ...]]:
    return [tuple(layers) for key, model in models.items() for _, layers in lists_of(model, key)]


# --- layers that stream --------------------------------------------------------------------


def stream(
    parts: list[StagePart], models: Mapping[str, Module], options: Options, chunk: int, room: int
) -> None:
    """Have some layers stream, as `options` say; append them to `parts` as a component.

    They are spread evenly, so that their copies hide under the layers in between. All have equally
    many chunks, so that each fits where another was. Raises: InvalidArgument.
    """
    main = next(part for part in parts if not part.encoder)
    divided, layers = _divided(main, models, chunk)
    if len(layers) <= SLOTS:
        raise InvalidArgument(
            f"{main.name}: {options.streams[0]} needs more than {SLOTS} layers of one size, and "
            f"its model has no list of so many: leave out {options.streams[0]}"
        )
    beside = [tensors for name, tensors in divided.items() if name not in layers]
    beside += [part.tensors for part in parts if part is not main]
    nbytes = max(nbytes_of(divided[name]) for name in layers)
    number, slots = _window(options, main.name, len(layers), nbytes, beside, chunk, room)
    if number <= slots:  # they would all be loaded at once
        return
    passing = {layers[(2 * i + 1) * len(layers) // (2 * number)] for i in range(number)}
    parts.append(_without(main, divided, divided.keys() - passing, f"{main.name}.streamed"))
    parts[-1].policy, parts[-1].slots = "sequential", slots
    stay = _without(main, divided, passing, main.name)
    main.layers, main.tensors = stay.layers, stay.tensors


def _window(
    options: Options,
    name: str,
    layers: int,
    nbytes: int,
    beside: Sequence[Tensors],
    chunk: int,
    room: int,
) -> tuple[int, int]:
    sizes = [nbytes_of(tensors) for tensors in beside]
    left = room - sum(vm.round_up(size, chunk) for size in sizes)
    room_for = left // vm.round_up(nbytes, chunk)
    number = number_of(options, name, layers, nbytes, sum(sizes), room_for)
    return number, slots_of(number, layers, room_for)


def _without(
    main: StagePart, divided: Mapping[str, Tensors], left_out: Collection[str], name: str
) -> StagePart:
    layers = {key: tensors for key, tensors in divided.items() if key not in left_out}
    tensors = {n: tensor for one in layers.values() for n, tensor in one.items()}
    return StagePart(name, main.policy, tensors=tensors, layers=layers)


def _divided(
    main: StagePart, models: Mapping[str, Module], chunk: int
) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    lists = _lists_of(models)
    divided = [by_layers(main.tensors, [layers], 1) for layers in lists]
    alike = [_alike(parts, chunk) for parts in divided]
    most = max(range(len(lists)), key=lambda i: _nbytes(divided[i], alike[i]), default=None)
    return ({}, []) if most is None else (divided[most], alike[most])


def _alike(parts: Mapping[str, Tensors], chunk: int) -> list[str]:
    by_chunks: dict[int, list[str]] = defaultdict(list)
    for name, tensors in parts.items():
        if name != REST:
            by_chunks[vm.round_up(nbytes_of(tensors), chunk)].append(name)
    return max(by_chunks.values(), key=len, default=[])


def _nbytes(parts: Mapping[str, Tensors], names: Sequence[str]) -> int:
    return sum(nbytes_of(parts[name]) for name in names)
