"""What a thread can hold of an attached component: all of it, a pass through it, or one block."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from swapd.shared.units import size
from swapd_client.errors import SwapdError
from swapd_client.interrupts import covered, to_its_end
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.scope import ComponentHold, Count, Entry, Holdable, Scope, here
from swapd_client.offload.stream import Stream

if TYPE_CHECKING:
    from swapd_client.offload.hooks import BlockHooks


@dataclass(eq=False, repr=False)
class PassHold:
    """A pass through a streamed component.

    It holds the whole component if that is on the device, else the tensors outside the blocks.
    """

    is_lease = False
    stream: Stream
    #: Its components outside the stream.
    beside: ComponentHold | None
    everything: ComponentHold
    hooks: "BlockHooks"
    uses: set[Entry] = field(default_factory=set)

    @property
    def client(self) -> AttachClient:
        return self.stream.client

    def take(self, scope: Scope, count: Count) -> None:
        whole, beside = Count(), Count()
        lent = Entry(self.everything, self, is_inner=True)
        count.give_back = partial(to_its_end, partial(self._leave, scope, lent, (whole, beside)))
        if self.beside is not None:
            self.beside.take(scope, beside)
        lease = self.stream.whole()
        if lease is not None:
            whole.give_back = lease.release
            self.stream.note(lease)
        elif not self.stream.is_private:
            self.stream.here().enter()
            self.hooks.begin(lent, whole=False)
            return
        scope.enter(lent, lent=True)  # then its blocks need no lease
        # in grad mode the hooks stay, to check each forward
        self.hooks.begin(lent, whole=not torch.is_grad_enabled())

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool:
        return self.everything.has_any(client, names)

    def _leave(self, scope: Scope, lent: Entry, counts: Sequence[Count]) -> None:
        """Undo `take`. May be repeated after an error or an interrupt, in `take` or here."""
        with ExitStack() as last:
            for count in reversed(counts):
                if count.give_back is not None:
                    last.callback(count.give_back)
            self.hooks.end(lent)
            scope.leave(lent)
            self.stream.here().leave()


class BlockHold:
    is_lease = False

    def __init__(self, whole: PassHold, number: int | None) -> None:
        """`number`: None for a layer outside the blocks, which needs `whole` only."""
        self.uses: set[Entry] = set()
        self.client = whole.client
        self._whole = whole
        self._number = number
        #: The component that it holds beside the pass.
        self.names = () if number is None else (whole.stream.parts[number],)

    def take(self, scope: Scope, count: Count) -> None:
        whole, number = self._whole, self._number
        entry = Entry(whole, self, is_inner=True)
        count.give_back = partial(to_its_end, partial(self._leave, scope, entry))
        # a hook called this and will leave it, so the hooks stay installed in any case
        whole.hooks.begin(entry, whole=False)
        scope.enter(entry)
        if number is not None and whole.everything not in scope.counts:
            whole.stream.here().need(number)

    def _leave(self, scope: Scope, entry: Entry) -> None:
        """Undo `take`. May be repeated after an error or an interrupt, in `take` or here."""
        whole = self._whole
        try:
            if self._number is not None:
                whole.stream.here().done(self._number)
        finally:
            try:
                scope.leave(entry)
            finally:
                whole.hooks.end(entry)

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool:
        return self._whole.has_any(client, names)


@dataclass(eq=False)
class AttachedComponent:
    name: str
    module: torch.nn.Module
    #: What a call of the module holds; None if the component has no weights in swapd.
    held: ComponentHold | PassHold | None
    #: The same as `held`, unless the component is streamed.
    all_of_it: ComponentHold
    nbytes: int
    blocks: dict[torch.nn.Module, BlockHold] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Attached {self.name} {size(self.nbytes)}>"


@dataclass(frozen=True)
class StreamedComponent:
    stream: Stream
    #: The modules of each block.
    blocks: tuple[tuple[torch.nn.Module, ...], ...]


class Use:
    """A `with` block that holds components. Reusable, and may be nested."""

    def __init__(
        self, client: AttachClient, all_of: Sequence[AttachedComponent], parts: Sequence[Holdable]
    ) -> None:
        """`parts`: what calls of other modules would hold."""
        whole = [one.all_of_it for one in all_of]
        if len(whole) > 1:
            names = dict.fromkeys(name for held in whole for name in held.names)
            whole = [ComponentHold(client, list(names))]
        #: One acquire takes all: threads that took components one by one could wait for each other.
        self._taken: list[Holdable] = [*whole, *parts]
        #: Calls inside the block find these held, and acquire nothing.
        self._lent = [one.held for one in all_of if one.held is not None]
        self._lent += [one.all_of_it for one in all_of]

    def __enter__(self) -> None:
        scope = here()
        before = len(scope.entries)
        try:
            for held in self._taken:
                scope.enter(Entry(held, self, is_call=False))
            for held in self._lent:
                entry = Entry(held, self, is_call=False)
                scope.enter(entry, lent=True)
                held.uses.add(entry)
        except BaseException:
            _leave(scope.entries[before:])
            raise

    @covered
    def __exit__(
        self, kind: object, exc: BaseException | None, where: object, mine: Sequence[Entry] = ()
    ) -> None:
        try:
            mine = self._last()
            _leave(mine)
        except SwapdError:
            if exc is None:  # an earlier error is the one to report
                raise
        except BaseException:
            _leave(mine or self._last())
            raise

    def _last(self) -> Sequence[Entry]:
        mine = [entry for entry in here().entries if entry.by is self]
        return mine[len(mine) - len(self._taken) - len(self._lent) :]


def _leave(entries: Sequence[Entry]) -> None:
    scope = here()

    def leave() -> None:
        with ExitStack() as stack:
            for entry in entries:
                stack.callback(_leave_one, scope, entry)

    to_its_end(leave)


def _leave_one(scope: Scope, entry: Entry) -> None:
    entry.held.uses.discard(entry)
    scope.leave(entry)
