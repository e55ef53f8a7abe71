"""Division of a component into parts of neighbouring layers, so that it is evicted in parts.

The component is registered as a family of these parts. Tensors in no layer, or in several
(embeddings, head, norms, tied weights), are the part `rest`. All parts are leased together. Lives
here: the assignment of tensors to parts. Does not import vLLM.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.nn import Module

from swapd.shared import vm
from swapd.shared.protocol import REST
from swapd_client.memory.layout import ALIGN_BYTES
from swapd_client.memory.tensors import inner_names, is_wrapper
from swapd_client.offload.blocks import lists_of
from swapd_client.offload.copies import start_of
from swapd_client.vllm.options import PART_CHUNKS
from swapd_client.vllm.parts import Part, Tensors


def divide(parts: Iterable[Part], models: Mapping[str, Module], chunk: int, room: int) -> None:
    """Divide those components of a stage that take turns and are large enough.

    `models`: as in `parts.parts_of`. `chunk`: the daemon's chunk in bytes. A stage that fits into
    `room` bytes whole, but not in parts, stays whole.
    """
    parts = tuple(parts)
    lists = [list(layers) for key, model in models.items() for _, layers in lists_of(model, key)]
    for part in parts:
        if part.policy == "lru" and not part.encoder:
            part.layers = by_layers(part.tensors, lists, PART_CHUNKS * chunk)
    taken = [nbytes_of(ts) for part in parts for ts in part.sources.values()]
    if sum(vm.round_up(nbytes, chunk) for nbytes in taken) > room:
        for part in parts:
            part.layers = {}


def by_layers(
    tensors: Tensors, lists: Iterable[Sequence[str]], least: int
) -> dict[str, dict[str, torch.Tensor]]:
    """`tensors` in parts of at least `least` bytes each, except `rest`, which is first.

    `lists`: the paths of consecutive layers. {} if there would be only one part of layers.
    """
    lists = [tuple(layers) for layers in lists]
    layer_of = _layers(tensors, {layer for layers in lists for layer in layers})
    of_layer: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, layer in layer_of.items():
        of_layer[layer][name] = tensors[name]
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for layers in lists:
        there = [layer for layer in layers if layer in of_layer]
        for group in _grouped(there, {one: nbytes_of(of_layer[one]) for one in there}, least):
            found = parts[_called(group)] = {}
            for layer in group:
                found |= of_layer.pop(layer)
    if len(parts) < 2:
        return {}
    grouped = {name for part in parts.values() for name in part}
    rest = {name: tensor for name, tensor in tensors.items() if name not in grouped}
    return {REST: rest, **parts} if rest else parts


def modules_of(models: Mapping[str, Module], part: str) -> list[Module]:
    """The layers of a part, by its name. `models`: as in `parts.parts_of`."""
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
    """Upper bound on their bytes together, each storage once."""
    stores = {start: n for one in tensors.values() for start, n in _stores(one)}
    return sum(vm.round_up(n, ALIGN_BYTES) for n in stores.values())


def _layers(tensors: Tensors, layers: Collection[str]) -> dict[str, str]:
    """The layer of each tensor; "" if it is in none, or shares memory with tensors elsewhere."""
    layer_of = {name: _around(name, layers) for name in tensors}
    stores = {name: {start for start, _ in _stores(one)} for name, one in tensors.items()}
    while True:  # all tensors inside one wrapper must stay together
        users: dict[int, set[str]] = defaultdict(set)
        for name, starts in stores.items():
            for start in starts:
                users[start].add(layer_of[name])
        shared = {start for start, of in users.items() if len(of) > 1}
        if not shared:
            return layer_of
        for name, starts in stores.items():
            if not shared.isdisjoint(starts):
                layer_of[name] = ""


def _around(name: str, layers: Collection[str]) -> str:
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _stores(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of its storages; of a wrapper, those of the tensors inside."""
    if is_wrapper(tensor):
        for name in inner_names(tensor):
            yield from _stores(getattr(tensor, name))
    elif start := start_of(tensor):
        yield start, tensor.untyped_storage().nbytes()


def _grouped(layers: Iterable[str], nbytes: Mapping[str, int], least: int) -> list[list[str]]:
    """Group neighbours of at least `least` bytes together; the remainder joins the last group.

    [] if all have less.
    """
    groups: list[list[str]] = []
    group: list[str] = []
    for layer in layers:
        group.append(layer)
        if sum(nbytes[one] for one in group) >= least:
            groups.append(group)
            group = []
    if groups:
        groups[-1] += group
    return groups


def _called(group: Sequence[str]) -> str:
    """Name such as "model.layers.4-7"."""
    first, last = group[0], group[-1].rpartition(".")[2]
    return first if len(group) == 1 else f"{first}-{last}"
