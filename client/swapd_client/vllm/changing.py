"""Weights that are written to while they are in swapd: copies are, and then take their place.

A component is read-only for its worker, and its addresses are in CUDA graphs. So while weights are
reloaded the parameters are over private copies; afterwards they are where they were, and swapd has
the new values. Does not import vLLM.
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


class _Moved(NamedTuple):
    """A parameter that is over a copy, and where it was."""

    tensor: torch.Tensor
    home: torch.Tensor


class WritableCopies:
    """The parameters of some components, over private copies. Values are read from the masters."""

    def __init__(self, client: Client, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """`parts`: by component, its parameters as they were registered.

        Needs memory for all of it where the parameters are. Raises: InvalidSource.
        """
        self._client = client
        self._moved: dict[str, dict[str, _Moved]] = {}
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
            self._moved[part] = {name: _Moved(t, t.data) for name, t in tensors.items()}
            for tensor in tensors.values():
                _point(tensor, copies.of(tensor).to(tensor.device))

    def keep(self) -> None:
        """Have swapd hold the values that the copies have now. Blocks for the copies.

        Raises: as `Client.update`; what was not kept by then is as it was.
        """
        for part, moved in self._moved.items():
            self._client.update(part, {name: one.tensor.data for name, one in moved.items()})

    def keep_private(self) -> None:
        """The same, when the client is closed and the weights are this process's own."""
        with torch.no_grad():
            for moved in self._moved.values():
                for tensor, home in moved.values():
                    home.copy_(tensor.data)

    def put_back(self) -> None:
        """Have the parameters where they were."""
        for moved in self._moved.values():
            for tensor, home in moved.values():
                _point(tensor, home)


@contextmanager
def changing(
    client: Client,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    when_gone: Callable[[SessionEnded], None],
) -> Iterator[None]:
    """While in it the parameters may be written to; if it ends well, swapd has what they are.

    If it raises, or what was written does not fit, they are as they were. If the daemon is gone by
    then, `when_gone` is to close the client, and the new values are in private memory.
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
