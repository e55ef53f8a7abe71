"""How many layers of a stage stream, and how many of these are on the device at a time. Pure."""

from math import ceil

from swapd.shared.units import size
from swapd_client.errors import InvalidArgument
from swapd_client.vllm.options import Options

#: Streamed layers that are on the device at a time: while one computes, the next is loaded. A
#: third, if two of them are neighbours, lets a copy begin before the layer in use has ended.
SLOTS, SLOTS_OF_NEIGHBOURS = 2, 3


def slots_of(streamed: int, layers: int, room_for: int) -> int:
    """`room_for`: number of layers that have room."""
    neighbours = 2 * streamed > layers
    fits = layers - streamed + SLOTS_OF_NEIGHBOURS <= room_for
    return SLOTS_OF_NEIGHBOURS if neighbours and fits else SLOTS


def fewest(layers: int, room_for: int) -> int:
    """Return the fewest layers to stream so that the others and the window fit; else all."""
    return 0 if layers <= room_for else min(max(layers + SLOTS - room_for, 1), layers)


def number_of(
    options: Options, name: str, layers: int, nbytes: int, beside: int, room_for: int
) -> int:
    """Return how many of the layers stream, as a stage's options say.

    `nbytes`: of a layer. `beside`: bytes of the weights that stay anyway. `room_for`: number of
    layers that have room beside these. Raises: InvalidArgument.
    """
    most = layers * nbytes
    if len(options.streams) > 1:
        raise InvalidArgument(
            f"{name}: {' and '.join(options.streams)} each say how many layers stream: set one of "
            "them"
        )
    if options.offload.enable_layerwise_offload:
        return layers
    if group := options.offload_group_size:
        return layers * options.offload_num_in_group // group
    if offloaded := options.offload.offloaded_bytes:
        if offloaded > most:
            raise InvalidArgument(
                f"{name}: cpu_offload_gb: {options.offload.cpu_offload_gb:g} is more than the "
                f"{size(most)} of its {layers} layers that can stream: set "
                "enable_layerwise_offload: true, and leave out cpu_offload_gb"
            )
        return ceil(offloaded / nbytes)
    if options.resident == "auto":
        return fewest(layers, room_for)
    assert options.resident is not None
    if beside > options.resident:
        raise InvalidArgument(
            f"{name}: resident: {size(options.resident)} is less than {size(beside)}, which its "
            "embeddings, head and encoders take: set resident to more"
        )
    return max(ceil((beside + most - options.resident) / nbytes), 0)
