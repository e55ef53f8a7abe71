"""Changes of weights that are in swapd: private copies take the writes, then replace the weights.

A component is read-only for its worker, and its addresses are in CUDA graphs. So while weights are
reloaded, the parameters point to private copies. Afterwards they point to their old addresses, and
swapd has the new values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch

from swapd_client.client import Client
from swapd_client.errors import InvalidSource, SessionEnded
from swapd_client.memory.movable import is_wrapper
from swapd_client.memory.part import Part
from swapd_client.offload.copies import Copies


@contextmanager
def changing(
    client: Client,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    when_gone: Callable[[SessionEnded], None],
) -> Iterator[None]:
    """In the block the parameters may be written to; at its end, swapd has the new values.

    `parts`: by component, its parameters as they were registered. They point to private copies, for
    which there must be memory on their device. If the block raises, or the new values do not fit,
    the old values stay. If the daemon is gone by then, `when_gone` must close the client, and the
    new values are in private memory. Raises: InvalidSource for a tensor that wraps others.
    """
    _refuse_wrappers(chain.from_iterable(tensors.items() for tensors in parts.values()))
    homes = [(t, t.data) for tensors in parts.values() for t in tensors.values()]
    owned = client.session.components
    copies = Copies(client.session, lambda at: _at(owned, at), nullcontext)
    try:
        for tensor, _ in homes:
            _point(tensor, copies.of(tensor).to(tensor.device))
        yield
        try:
            for part, tensors in parts.items():
                client.update(part, {name: tensor.data for name, tensor in tensors.items()})
        except SessionEnded as exc:
            when_gone(exc)
            with torch.no_grad():
                for tensor, home in homes:
                    home.copy_(tensor.data)
    finally:
        for tensor, home in homes:
            _point(tensor, home)


def _refuse_wrappers(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if is_wrapper(tensor):
            raise InvalidSource(
                f"{name!r} is a {type(tensor).__name__}, which wraps others: it cannot be "
                "reloaded in place. Start the stage again with the new weights"
            )


def _at(components: Mapping[str, Part], address: int) -> Part | None:
    for part in components.values():
        if part.address <= address < part.address + part.nbytes:
            return part
    return None


def _point(tensor: torch.Tensor, where: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = where
