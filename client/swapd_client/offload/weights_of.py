"""The weights of registered components: whose a tensor is, its bytes, new bytes for it."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from swapd_client.client import Client
from swapd_client.component import Component
from swapd_client.offload.copies import Copies, start_of
from swapd_client.tensors import PlacedTensors, inner_names, is_wrapper

#: Takes a lease on all of the components, in a `with` block.
Hold = Callable[[], AbstractContextManager[object]]


class Weights(Protocol):
    """What one attached component has in swapd, be it registered as one or in parts."""

    name: str

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are swapd's."""

    def copies(self) -> Copies:
        """Copies of these tensors, to be made one by one; see there."""

    def update(self, values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give tensors new values, all at once: (the tensor, its value).

        Blocks. Raises what an acquire raises; then nothing has changed.
        """


class Registered:
    """The weights of components that this client registered from tensors."""

    def __init__(
        self, client: Client, name: str, components: Sequence[Component], hold: Hold | None = None
    ) -> None:
        """`hold` instead of an acquire, for who counts what each thread holds."""
        self.name = name
        self._client = client
        self._components = sorted(components, key=lambda part: part.address)
        self._addresses = [part.address for part in self._components]
        self._hold = hold or (lambda: client.acquire(*(part.name for part in components)))

    def __repr__(self) -> str:
        return f"<Registered {self.name}>"

    def covers(self, tensor: torch.Tensor) -> bool:
        if is_wrapper(tensor):
            return any(self.covers(getattr(tensor, name)) for name in inner_names(tensor))
        return self._owner(start_of(tensor)) is not None

    def copies(self) -> Copies:
        return Copies(self._client.session, self._owner, self._hold)

    def update(self, values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        clean: dict[str, dict[str, torch.Tensor]] = {}
        mutable = []
        for tensor, value in _unwrapped(values):
            part = self._owner(start_of(tensor))
            if part is None or part.mutable:
                mutable.append((tensor, value))
            else:
                whole, key = _updated_as(part, _name_in(part, tensor))
                clean.setdefault(whole, {})[key] = value
        if mutable:
            with self._hold(), torch.no_grad():
                for tensor, value in mutable:
                    tensor.copy_(value)
        for name, named in clean.items():
            self._client.update(name, named)

    def _owner(self, address: int) -> Component | None:
        """Whose range an address is in, unless that component is none any more."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or not address:
            return None
        part = self._components[at]
        known = self._client.session.components.get(part.name) is part
        return part if known and address < part.address + part.nbytes else None


def _updated_as(part: Component, name: str) -> tuple[str, str]:
    """What is updated for a tensor of a component, and what the tensor is called there.

    The blocks of one component are updated together.
    """
    family = f"{part.part_of}/"
    if not part.part_of or not part.name.startswith(family):
        return part.name, name
    return part.part_of, f"{part.name.removeprefix(family)}.{name}"


def _unwrapped(
    values: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same for the tensors that are inside wrappers."""
    flat = []
    for tensor, value in values:
        if is_wrapper(tensor):
            inner = [(getattr(tensor, n), getattr(value, n)) for n in inner_names(tensor)]
            flat += _unwrapped(inner)
        else:
            flat.append((tensor, value))
    return flat


def _name_in(part: Component, tensor: torch.Tensor) -> str:
    """A tensor's name in its component; if it has several, they are of the same bytes."""
    layout = part._layout
    assert isinstance(layout, PlacedTensors)
    sought = (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.data_ptr() - part.address,
    )
    return next(placed.name for placed in layout.placed if placed[1:] == sought)
