"""Changes of weights that are in swapd: private copies take the writes, then replace the weights.

A component is read-only for its worker, and its addresses are in CUDA graphs. So while weights are
reloaded, the parameters point to private copies. Afterwards they point to their old addresses, and
swapd has the new values.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from swapd_client.client import Client
from swapd_client.errors import InvalidSource, SessionEnded
from swapd_client.memory.part import Part
from swapd_client.memory.tensors import is_wrapper
from swapd_client.offload.copies import Copies


class _PrivateCopy(NamedTuple):
    tensor: torch.Tensor
    home: torch.Tensor


class WritableCopies:
    """The parameters of some components, in private copies. Values are read from the host
    copies."""

    def __init__(self, client: Client, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """`parts`: by component, its parameters as they were registered.

        Needs memory for all of them on the device of the parameters. Raises: InvalidSource.
        """
        self._client = client
        self._moved: dict[str, dict[str, _PrivateCopy]] = {}
        owned = client.session.components
        copies = Copies(client.session, lambda at: _at(owned, at), nullcontext)
        for tensors in parts.values():
            for name, tensor in tensors.items():
                if is_wrapper(tensor):
                    raise InvalidSource(
                        f"{name!r} is a {type(tensor).__name__}, which wraps others: it cannot be "
                        "reloaded in place. Start the stage again with the new weights"
                    )
        for part, tensors in parts.items():
            self._moved[part] = {name: _PrivateCopy(t, t.data) for name, t in tensors.items()}
            for tensor in tensors.values():
                _point(tensor, copies.of(tensor).to(tensor.device))

    def keep(self) -> None:
        """Give swapd the values of the copies. Blocks for the copies.

        Raises as `Client.update`; components not updated by then are unchanged.
        """
        for part, moved in self._moved.items():
            self._client.update(part, {name: one.tensor.data for name, one in moved.items()})

    def keep_private(self) -> None:
        """The same, when the client is closed and the weights are private memory."""
        with torch.no_grad():
            for moved in self._moved.values():
                for tensor, home in moved.values():
                    home.copy_(tensor.data)

    def put_back(self) -> None:
        """Point the parameters to their old places."""
        for moved in self._moved.values():
            for tensor, home in moved.values():
                _point(tensor, home)


@contextmanager
def changing(
    client: Client,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    when_gone: Callable[[SessionEnded], None],
) -> Iterator[None]:
    """In the block the parameters may be written to; at its end, swapd has the new values.

    If the block raises, or the new values do not fit, the old values stay. If the daemon is gone by
    then, `when_gone` must close the client, and the new values are in private memory.
    """
    aside = WritableCopies(client, parts)
    try:
        yield
        try:
            aside.keep()
        except SessionEnded as exc:
            when_gone(exc)
            aside.keep_private()
    finally:
        aside.put_back()


def _at(components: Mapping[str, Part], address: int) -> Part | None:
    for part in components.values():
        if part.address <= address < part.address + part.nbytes:
            return part
    return None


def _point(tensor: torch.Tensor, where: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = where
