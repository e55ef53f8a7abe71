"""Which layers of a stage come and go inside each step, because its weights do not fit.

They are a family of their own, beside that of the weights that stay for a turn (`stage/window.py`).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from swapd.shared.protocol import REST
from swapd.shared.vm import round_up
from swapd_client.errors import InvalidSettings
from swapd_client.offload.blocks import lists_of
from swapd_client.vllm.layers import by_layers, nbytes_of
from swapd_client.vllm.options import Options
from swapd_client.vllm.parts import StagePart, Tensors
from swapd_client.vllm.window_size import SLOTS, number_of, slots_of


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
    if len(layers) <= SLOTS:
        raise InvalidSettings(
            f"{main.name}: {options.streams[0]} needs more than {SLOTS} layers of one size, and "
            f"its model has no list of so many: leave out {options.streams[0]}"
        )
    beside = [tensors for name, tensors in divided.items() if name not in layers]
    beside += [part.tensors for part in parts if part is not main]
    nbytes = max(nbytes_of(divided[name]) for name in layers)
    number, slots = _window(options, main.name, len(layers), nbytes, beside, chunk, room)
    if number <= slots:  # they would all be in at once
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
    """How many of the layers, each of `nbytes`, stream, and how many of these are in at a time."""
    sizes = [nbytes_of(tensors) for tensors in beside]
    left = room - sum(round_up(size, chunk) for size in sizes)
    room_for = left // round_up(nbytes, chunk)
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
