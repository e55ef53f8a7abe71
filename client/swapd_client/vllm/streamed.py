"""Which layers of a stage come and go inside each step, because its weights do not fit.

They are a family of their own, beside that of the weights that stay for a turn (`stage/window.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil

from torch import Tensor
from torch.nn import Module

from swapd.shared.protocol import REST
from swapd.shared.units import size
from swapd.shared.vm import round_up
from swapd_client.errors import InvalidSettings
from swapd_client.offload.blocks import lists_of
from swapd_client.vllm.layers import by_layers, nbytes_of
from swapd_client.vllm.options import Options
from swapd_client.vllm.parts import StagePart, Tensors

#: Streamed layers that are in at a time: one computes and one comes in; and a third, if two
#: streamed layers are neighbours, so that a copy can begin before the layer in use has ended.
SLOTS, SLOTS_OF_NEIGHBOURS = 2, 3


def split(
    parts: list[StagePart], models: Mapping[str, Module], options: Options, chunk: int, room: int
) -> None:
    """Have layers of a stage's own component stream, as `options` say: the last of `parts` then.

    `models`: as in `parts.parts_of`. They are layers of the list with most bytes, spread evenly, so
    that their copies hide under the layers in between. All have equally many chunks of `chunk`
    bytes, so that each fits where another was. `room`: the bytes that the daemon can lend. Raises:
    InvalidSettings.
    """
    main = next(part for part in parts if not part.encoder)
    divided, layers = _divided(main, models, chunk)
    sizes = [nbytes_of(divided[name]) for name in layers]
    if len(layers) <= SLOTS:
        raise InvalidSettings(
            f"{main.name}: {options.streams} needs more than {SLOTS} layers of one size, and its "
            f"model has no list of so many: leave out {options.streams}"
        )
    beside = [nbytes_of(part.tensors) for part in parts if part is not main]
    beside += [nbytes_of(tensors) for name, tensors in divided.items() if name not in layers]
    each = round_up(max(sizes), chunk)
    left = room - sum(round_up(nbytes, chunk) for nbytes in beside)
    room_for = left // each  # layers
    number = _number(options, main.name, sizes, sum(beside), room_for)
    slots = _slots(number, len(sizes), room_for)
    if number <= slots:  # they would all be in at once
        return
    passing = {layers[(2 * i + 1) * len(layers) // (2 * number)] for i in range(number)}
    parts.append(_part(f"{main.name}.streamed", divided, passing, slots))
    main.layers = {name: found for name, found in divided.items() if name not in passing}
    main.tensors = {n: t for found in main.layers.values() for n, t in found.items()}


def _part(name: str, divided: Mapping[str, Tensors], passing: set[str], slots: int) -> StagePart:
    layers = {name: tensors for name, tensors in divided.items() if name in passing}
    tensors = {n: t for found in layers.values() for n, t in found.items()}
    return StagePart(name, "sequential", tensors=tensors, layers=layers, slots=slots)


def _divided(
    main: StagePart, models: Mapping[str, Module], chunk: int
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The component in parts of one layer each, and the names of those that may stream."""
    lists = [tuple(layers) for key, model in models.items() for _, layers in lists_of(model, key)]
    divided = [by_layers(main.tensors, [layers], 1) for layers in lists]
    alike = [_alike(parts, chunk) for parts in divided]
    most = max(range(len(lists)), key=lambda i: _nbytes(divided[i], alike[i]), default=None)
    return ({}, []) if most is None else (divided[most], alike[most])


def _alike(parts: Mapping[str, Tensors], chunk: int) -> list[str]:
    """The layers of the most frequent number of chunks."""
    by_chunks: dict[int, list[str]] = defaultdict(list)
    for name, tensors in parts.items():
        if name != REST:
            by_chunks[round_up(nbytes_of(tensors), chunk)].append(name)
    return max(by_chunks.values(), key=len, default=[])


def _nbytes(parts: Mapping[str, Tensors], names: Sequence[str]) -> int:
    return sum(nbytes_of(parts[name]) for name in names)


def _slots(number: int, layers: int, room_for: int) -> int:
    """How many of `number` streamed layers are in at a time, where so many have room."""
    neighbours = 2 * number > layers
    fits = layers - number + SLOTS_OF_NEIGHBOURS <= room_for
    return SLOTS_OF_NEIGHBOURS if neighbours and fits else SLOTS


def _number(options: Options, name: str, sizes: Sequence[int], beside: int, room_for: int) -> int:
    """How many of the layers stream. `beside`: the bytes that stay anyway."""
    most, layer, layers = sum(sizes), max(sizes), len(sizes)
    if options.offload.enable_layerwise_offload:
        return layers
    if group := options.offload_group_size:
        return layers * options.offload_num_in_group // group
    if offloaded := options.offload.offloaded_bytes:
        if offloaded > most:
            raise InvalidSettings(
                f"{name}: cpu_offload_gb: {options.offload.cpu_offload_gb:g} is more than the "
                f"{size(most)} of its {layers} layers that can stream: set "
                "enable_layerwise_offload: true, and leave out cpu_offload_gb"
            )
        return ceil(offloaded / layer)
    if options.resident == "auto":
        whole = range(layers + 1)
        fits = (n for n in whole if layers - n + (n and _slots(n, layers, room_for)) <= room_for)
        return next(fits, layers)
    assert options.resident is not None
    if beside > options.resident:
        raise InvalidSettings(
            f"{name}: resident: {size(options.resident)} is less than {size(beside)}, which its "
            "embeddings, head and encoders take: set resident to more"
        )
    return max(ceil((beside + most - options.resident) / layer), 0)
