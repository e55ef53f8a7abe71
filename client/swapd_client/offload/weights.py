"""The weights of registered components: the owner of a tensor, its bytes, and new bytes.

A write to weights in swapd would crash the process. So during an edit, each tensor is over a
private copy. When the thread's outermost edit ends, the written values become the weights of all
components at once, while no other thread is in a call of them. Then this thread acquires its leases
again, with the new values.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.interrupts import covered_block, to_its_end
from swapd_client.memory.movable import leaves
from swapd_client.memory.part import Part
from swapd_client.memory.tensors import PlacedTensors
from swapd_client.offload.copies import Copies, start_of
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.scope import here
from swapd_client.offload.update_barrier import quiet

#: Acquires all of the components; given a module in one, what a call of it holds.
_Hold = Callable[..., AbstractContextManager[object]]
Values = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Changes:
    """New values for weights of any number of components. Those of one client change at once."""

    def __init__(self) -> None:
        #: New values by client, component and name.
        self._clean: dict[AttachClient, dict[str, dict[str, torch.Tensor]]] = {}
        self.mutable: list[tuple[_Hold, torch.Tensor, torch.Tensor]] = []
        #: Components that a call may hold part by part, or that are written in place.
        self.in_steps: dict[AttachClient, set[str]] = {}

    def add(self, client: AttachClient, part: Part, name: str, value: torch.Tensor) -> None:
        whole, key = _updated_as(part, name)
        self._clean.setdefault(client, {}).setdefault(whole, {})[key] = value
        if part.part_of:
            self.quieten(client, client.session.registry.family(part.part_of))

    def quieten(self, client: AttachClient, names: Iterable[str]) -> None:
        """Apply the changes while no call of these components is under way."""
        self.in_steps.setdefault(client, set()).update(names)

    def apply(self, also: Callable[[], None] = lambda: None) -> None:
        """Apply all changes, client by client, and call `also` for private tensors.

        Blocks, also for calls in other threads. Raises as `Client.update` and `Client.acquire`;
        then the weights of this client and of later ones have not changed.
        """
        holds = list(dict.fromkeys(hold for hold, _, _ in self.mutable))
        if self.in_steps:
            holds.append(lambda: quiet(self.in_steps))
        self._apply_under(holds, also)

    def _apply_under(self, holds: Sequence[_Hold], also: Callable[[], None]) -> None:
        if holds:  # not an ExitStack: an interrupt in it would leave what it has entered
            with holds[0]():
                return self._apply_under(holds[1:], also)
        for client, named in self._clean.items():
            client._update_together(named)
        with torch.no_grad():
            for _, tensor, value in self.mutable:
                tensor.copy_(value)
        also()


class ComponentWeights:
    def __init__(
        self,
        client: AttachClient,
        name: str,
        components: Sequence[Part],
        hold: _Hold | None = None,
        inside: Collection[torch.nn.Module] | None = None,
    ) -> None:
        """`hold`: replaces an acquire, for callers that count each thread's leases.

        `inside`: the modules in the component; None: all that are guarded for it.
        """
        self.name = name
        #: Modules that have, or may get, its tensors, as a set.
        self.guarded: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()
        self._inside = inside
        self._client = client
        self._components = sorted(components, key=lambda part: part.address)
        self._addresses = [part.address for part in self._components]
        names = tuple(part.name for part in components)
        self.hold = hold or (lambda *_: client.leasing.take(names))

    def covers(self, tensor: torch.Tensor) -> bool:
        return any(self._owner(start_of(one)) is not None for _, one in leaves("", tensor))

    def copies(self) -> Copies:
        return Copies(self._client.session, self._owner, self.hold)

    def change(self, values: Values, changes: Changes) -> None:
        names: dict[Part, dict[object, str]] = {}
        for tensor, value in _unwrapped(values):
            part = self._owner(start_of(tensor))
            if part is None or part.mutable:
                changes.mutable.append((self.hold, tensor, value))
                self.quieten(changes)
            else:
                if part not in names:
                    names[part] = _names_in(part)
                changes.add(self._client, part, _name_in(part, names[part], tensor), value)

    def quieten(self, changes: Changes) -> None:
        changes.quieten(self._client, [part.name for part in self._components])

    def has_inside(self, module: torch.nn.Module) -> bool:
        return self._inside is None or module in self._inside

    def _owner(self, address: int) -> Part | None:
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or not address:
            return None
        part = self._components[at]
        known = self._client.session.has(part)
        return part if known and address < part.address + part.nbytes else None


class CopiesByOwner(dict[ComponentWeights, Copies]):
    def __missing__(self, weights: ComponentWeights) -> Copies:
        made = self[weights] = weights.copies()
        return made


def _updated_as(part: Part, name: str) -> tuple[str, str]:
    """Return the names for `Client.update`: of a component, or its family, and of a tensor."""
    family = f"{part.part_of}/"
    if not part.part_of or not part.name.startswith(family):
        return part.name, name
    return part.part_of, f"{part.name.removeprefix(family)}.{name}"


def _unwrapped(values: Values) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tensor, value in values:
        for (_, mine), (_, its) in zip(leaves("", tensor), leaves("", value), strict=True):
            yield mine, its


def _names_in(part: Part) -> dict[object, str]:
    layout = part.layout
    assert isinstance(layout, PlacedTensors)
    return {placed[1:]: placed.name for placed in reversed(layout.placed)}


def _name_in(part: Part, names: dict[object, str], tensor: torch.Tensor) -> str:
    place = tensor.data_ptr() - part.address
    if name := names.get((tensor.dtype, tuple(tensor.shape), tensor.stride(), place)):
        return name
    raise NotWhileAttached(
        f"a view of weights of {part.name!r}, which are in swapd, was written to: the weights keep "
        "their old bytes. Do this in `with attachment.edit(...)`"
    )


Covered = tuple[torch.Tensor, str, ComponentWeights]


class _WeightEdit:
    def __init__(self, covered: Covered) -> None:
        self.tensor, self._name, self.weights = covered
        self._there = self.tensor.data
        self._value: torch.Tensor | None = None

    def begin(self, copies: Copies, written: torch.Tensor | None) -> None:
        """`written`: the value from an earlier edit of this thread that is not applied yet."""
        copy = copies.of(self.tensor).to(self.tensor.device) if written is None else written
        #: The copy's address; 0 if the copy may already differ from the weights.
        self._memory = copy.data_ptr() if written is None else 0
        self._put(copy)

    def _put(self, data: torch.Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.tensor.data = data

    def end(self, unchanged: CopiesByOwner) -> torch.Tensor | None:
        """Put the tensor back; return its value if it changed. Raises: NotWhileAttached.

        May be repeated after an interrupt.
        """
        value = self._value = self.tensor.data if self._value is None else self._value
        self._put(self._there)
        if value.data_ptr() == self._there.data_ptr():
            return None  # an interrupt came before it was over a copy
        if value.shape != self._there.shape or value.dtype != self._there.dtype:
            raise NotWhileAttached(
                f"{self._name!r} became {tuple(value.shape)} of {value.dtype}, but in swapd, as "
                f"part of {self.weights.name!r}, it is {tuple(self._there.shape)} of "
                f"{self._there.dtype}: it keeps its old bytes. detach() first, then do this, then "
                "attach() again"
            )
        if value.data_ptr() == self._memory and _same_bytes(
            value, unchanged[self.weights].of(self.tensor)
        ):
            return None
        return value


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, so that equal NaNs are equal."""
    bits = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


#: New values from the edits of a thread, by owner and tensor id.
_Written = dict[ComponentWeights, dict[int, tuple[torch.Tensor, torch.Tensor]]]
#: `values` of this thread; missing or None outside of an edit.
_thread = threading.local()


@covered_block
def edits(weights: Sequence[ComponentWeights]) -> Generator[None, None, None]:
    """A `with` block. At its end, all weights edited in it change at once.

    If it raises, the values written so far apply, as in private memory. The block begins when the
    calls of `weights` in other threads have ended; new ones wait. Raises as `Client.update` and
    `Client.acquire`.
    """
    changes = Changes()
    for one in weights:
        one.quieten(changes)
    if getattr(_thread, "values", None) is not None:
        with quiet(changes.in_steps):
            yield
        return
    changed = False
    try:
        with quiet(changes.in_steps):
            values = _thread.values = _Written()
            try:
                yield
            finally:
                _thread.values = None
                changed = bool(values)  # also if an interrupt comes once they have changed
                for one, new in values.items():
                    one.change(list(new.values()), changes)
                    one.quieten(changes)
                if values:
                    changes.apply()
    finally:
        if changed:
            here().renew(changes.in_steps)


@covered_block
def edited(
    covered: Iterable[Covered], weights: Sequence[ComponentWeights]
) -> Generator[None, None, None]:
    """A `with` block in which any code may write to these tensors; see `edits`."""
    with edits(weights):
        values: _Written = _thread.values
        copies, fresh = CopiesByOwner(), CopiesByOwner()
        staged: list[_WeightEdit] = []
        problems: list[NotWhileAttached] = []

        def end() -> None:
            while staged:
                each = staged[-1]
                try:
                    value = each.end(fresh)
                except NotWhileAttached as exc:
                    problems.append(exc)
                else:
                    if value is not None:
                        values.setdefault(each.weights, {})[id(each.tensor)] = each.tensor, value
                staged.pop()

        try:
            for one in covered:
                tensor, _, its = one
                _, written = values.get(its, {}).get(id(tensor), (tensor, None))
                # first: an interrupt may come once it is over a copy
                staged.append(_WeightEdit(one))
                staged[-1].begin(copies[its], written)
            yield
        finally:
            to_its_end(end)
            if problems:
                raise problems[-1]
