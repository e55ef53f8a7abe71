"""The weights of registered components: the owner of a tensor, its bytes, and new bytes."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.memory.part import Part
from swapd_client.memory.tensors import PlacedTensors, inner_names, is_wrapper
from swapd_client.offload.changing import quiet
from swapd_client.offload.copies import Copies, start_of
from swapd_client.offload.lender import Lender

#: A `with` block with a lease on all of the components.
Hold = Callable[[], AbstractContextManager[object]]


#: Tensors, and their new values.
Values = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Changes:
    """New values for the weights of any number of components, which all change at once."""

    def __init__(self) -> None:
        #: By client and component: the new values by name.
        self._clean: dict[Lender, dict[str, dict[str, torch.Tensor]]] = {}
        self._mutable: list[tuple[Hold, torch.Tensor, torch.Tensor]] = []
        #: Components that a call may hold part by part, or that are written in place.
        self.in_steps: dict[Lender, set[str]] = {}

    def add(self, client: Lender, part: Part, name: str, value: torch.Tensor) -> None:
        """Give a tensor of a clean component a new value."""
        whole, key = _updated_as(part, name)
        self._clean.setdefault(client, {}).setdefault(whole, {})[key] = value
        if part.part_of:
            self.quieten(client, client.session.registry.family(part.part_of))

    def add_mutable(self, hold: Hold, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give a tensor that is writable under a lease a new value."""
        self._mutable.append((hold, tensor, value))

    def quieten(self, client: Lender, names: Iterable[str]) -> None:
        """Apply the changes while no call of these components is under way."""
        self.in_steps.setdefault(client, set()).update(names)

    def apply(self, also: Callable[[], None]) -> None:
        """Apply all changes, then call `also` for private tensors. Several clients go one by one.

        Blocks, also for calls in other threads whose weights cannot change under them. Raises as
        `Client.update` and `Client.acquire`; then no weights have changed, except mutable ones in
        part.
        """
        with ExitStack() as stack:
            for hold in dict.fromkeys(hold for hold, _, _ in self._mutable):
                stack.enter_context(hold())
            if self.in_steps:
                stack.enter_context(quiet(self.in_steps))
            for client, named in self._clean.items():
                client._update_together(named)
            with torch.no_grad():
                for _, tensor, value in self._mutable:
                    tensor.copy_(value)
            also()


class Weights(Protocol):
    """The weights of one attached component, registered as one or in parts."""

    name: str

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are in the component."""

    def copies(self) -> Copies:
        """A new `Copies` for these tensors."""

    def change(self, values: Values, changes: "Changes") -> None:
        """Add new values of these tensors to `changes`."""

    def quieten(self, changes: Changes) -> None:
        """Have `changes` apply while no call of the component is under way."""

    def has_inside(self, module: torch.nn.Module) -> bool:
        """Whether a module is in the component, so that it runs under its lease."""


class Registered:
    """The weights of components that this client registered from tensors."""

    def __init__(
        self,
        client: Lender,
        name: str,
        components: Sequence[Part],
        hold: Hold | None = None,
        inside: Collection[torch.nn.Module] | None = None,
    ) -> None:
        """`hold`: replaces an acquire, for callers that count each thread's leases. `inside`: the
        modules in the component; None: all that are guarded for it.
        """
        self.name = name
        self._inside = inside
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

    def change(self, values: Values, changes: Changes) -> None:
        for tensor, value in _unwrapped(values):
            part = self._owner(start_of(tensor))
            if part is None or part.mutable:
                changes.add_mutable(self._hold, tensor, value)
                self.quieten(changes)
            else:
                changes.add(self._client, part, _name_in(part, tensor), value)

    def quieten(self, changes: Changes) -> None:
        changes.quieten(self._client, [part.name for part in self._components])

    def has_inside(self, module: torch.nn.Module) -> bool:
        return self._inside is None or module in self._inside

    def _owner(self, address: int) -> Part | None:
        """The component at an address, unless it has been unregistered."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or not address:
            return None
        part = self._components[at]
        known = self._client.session.components.get(part.name) is part
        return part if known and address < part.address + part.nbytes else None


def _updated_as(part: Part, name: str) -> tuple[str, str]:
    """The names for `Client.update` of a component, or of its family, and of a tensor in it.

    The blocks of one component are updated together.
    """
    family = f"{part.part_of}/"
    if not part.part_of or not part.name.startswith(family):
        return part.name, name
    return part.part_of, f"{part.name.removeprefix(family)}.{name}"


def _unwrapped(values: Values) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same values for the tensors inside wrappers."""
    flat = []
    for tensor, value in values:
        if is_wrapper(tensor):
            inner = [(getattr(tensor, n), getattr(value, n)) for n in inner_names(tensor)]
            flat += _unwrapped(inner)
        else:
            flat.append((tensor, value))
    return flat


def _name_in(part: Part, tensor: torch.Tensor) -> str:
    """A tensor's name in its component; several names mean the same bytes."""
    layout = part.layout
    assert isinstance(layout, PlacedTensors)
    sought = (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.data_ptr() - part.address,
    )
    for placed in layout.placed:
        if placed[1:] == sought:
            return placed.name
    raise NotWhileAttached(
        f"a view of weights of {part.name!r}, which are in swapd, was written to: the weights keep "
        "their old bytes. Do this in `with attachment.edit(...)`"
    )
