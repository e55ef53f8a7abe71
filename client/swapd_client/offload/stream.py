"""Streams one component block by block: while one computes, the next are copied.

A part that is not kept leaves the device at its release. At most `SLOTS` of them are there at a
time, in use or in transfer. When a part is needed, the stream requests the next ones.

A thread never waits while it holds parts that it only read ahead: two such threads could wait for
each other. If a request ahead has no grant when its part is needed, the thread releases all other
parts read ahead, and replaces the request by an ordinary one that waits. The same holds for any
other acquire of the thread in the middle of a pass, once it has waited for a moment.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import filterfalse

from swapd.shared.protocol import Placement
from swapd_client.errors import Deadlock, SwapdError, Timeout, TooLarge, UnknownComponent
from swapd_client.finalizers import give_back_later
from swapd_client.lease import Lease, wait_here
from swapd_client.offload.lender import AttachClient

#: Seconds to wait for the grant of a request ahead: longer than an answer takes, and short, because
#: deadlock detection does not see this wait.
GRANT_S = 0.01
#: Limit, per thread, of parts on the device that are not kept: the running block and the next.
SLOTS = 2


class Stream:
    """The parts of one component, for the passes of any number of threads.

    If all of it is on the device, a pass takes it as one (`whole`). Otherwise its thread calls on
    its pass (`here`) `enter`, then `need` and `done` for each block, then `leave`.
    """

    def __init__(
        self,
        client: AttachClient,
        family: str,
        rest: str | None,
        parts: Sequence[str],
        *,
        has_lost: bool = False,
    ) -> None:
        """`rest`: the component with the tensors outside the blocks, held for a whole pass.

        `parts`: the components of the blocks, in their expected order of use. `has_lost`: the
        family may have others, which the model has lost.
        """
        self.client = client
        self.family = family
        self.rest = rest
        self.parts = tuple(parts)
        self.order = Order(len(self.parts))
        self.everything = (*([rest] if rest else []), *self.parts)
        self._whole = self.everything if has_lost else (family,)
        #: Whether a part leaves the device at its release, as of the last grant.
        self._transient: dict[str, bool] = {}
        #: False if a part is known to leave: then `whole` does not try.
        self.may_be_in = True
        #: The placements that the last two were learned from.
        self._noted: tuple[Placement, ...] = ()
        self._local = threading.local()

    @property
    def is_private(self) -> bool:
        return self.everything[0] not in self.client.session.components

    def whole(self) -> Lease | None:
        """Return a lease on all of it, to be noted, if it is on the device.

        Raises as `Client.acquire`.
        """
        if not self.may_be_in:
            return None
        try:
            return self.client.leasing.take(self._whole, timeout_s=0)
        except (Timeout, TooLarge, UnknownComponent):
            return None

    def passes(self, part: int) -> bool:
        """Whether a part takes a slot; an unknown part does."""
        return self._transient.get(self.parts[part], True)

    def note(self, lease: Lease) -> None:
        """Learn from a grant which parts are kept, which may change at any time."""
        lease.answered_for()
        places = lease.placements
        if places is not self._noted:  # the same object if the lease was kept between passes
            self._transient.update((place.name, place.transient) for place in places)
            self.may_be_in = not any(self._transient.values())
            self._noted = places

    def here(self) -> "StreamPass":
        here: StreamPass | None = getattr(self._local, "here", None)
        if here is None or here.leasing is not self.client.leasing:
            here = self._local.here = StreamPass(self)
        return here


class StreamPass:
    """The leases and open requests of one thread for a stream.

    An interrupt may end a method anywhere. So a request is noted before it is sent, until its lease
    is noted. A lost lease is released when it is collected; a release may be repeated.
    """

    def __init__(self, stream: Stream) -> None:
        self._process = os.getpid()
        self._stream = stream
        self._client = stream.client
        #: With another daemon the client has another one; then this pass is over.
        self.leasing = stream.client.leasing
        #: The channel that sent the requests: on another, `abandon` could overtake them.
        self._channel = self.leasing.factory.channel()
        self._rest: Lease | None = None
        #: Blocks that run now; several if they are nested.
        self._used: dict[int, Lease] = {}
        #: Parts read ahead: the request, or the lease of a part that is used again at once.
        self._ahead: dict[int, int | Lease] = {}
        #: None outside of a pass: a block may be called alone.
        self._expected: ExpectedParts | None = None
        self._seen: list[int] = []
        #: Leases of released parts whose GPU work may not be done, oldest first.
        self._ending: list[int] = []
        self._hinted = False
        self.leasing.readers.add(self)

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the thread ended in the middle of a pass
        held = self._holds or self._ending
        # not in a forked child, which began in the middle of the pass
        if held and self._process == getpid():
            give_back_later(self._give_back)

    @property
    def _holds(self) -> bool:
        return self._rest is not None or bool(self._used or self._ahead)

    def enter(self) -> None:
        """Begin a pass: load the tensors outside the blocks. Leave a pass that was not left.

        Raises as `Client.acquire`; then nothing is held.
        """
        self.leave()
        stream, client = self._stream, self._client
        self._expected = stream.order.expected()
        try:
            if stream.rest is not None:
                self._rest = client.leasing.take((stream.rest,), early=True)
                stream.note(self._rest)
            self._look_ahead()
            if self._rest is not None:
                wait_here(self._rest)
        except BaseException:
            self._expected = None
            self._give_back()
            raise

    def need(self, part: int) -> None:
        """Hold a block, and request the next ones.

        On return the block is there, or on a GPU the current stream waits for it. Raises as
        `Client.acquire` and `Lease.wait`; then the block is not held.
        """
        lease = self._take(part)
        try:
            self._stream.note(lease)
            self._ahead.pop(part, None)
            if self._expected is not None:
                self._expected.used(part)
                self._seen.append(part)
            self._used[part] = lease
            self._look_ahead()
            wait_here(lease)
        except BaseException:
            self._used.pop(part, None)
            with suppress(SwapdError):  # an earlier error is the one to report
                lease.release()
            raise

    def done(self, part: int) -> None:
        """End the use of a block. No-op for a block that was not needed."""
        lease = self._used.get(part)
        if lease is None:
            return
        if self._expected is not None and self._expected.coming[:1] == (part,):
            self._ahead[part] = lease
            del self._used[part]
            return
        try:
            lease.release()
        finally:
            del self._used[part]
        if self._client.session.processor.works_late and self._stream.passes(part):
            self._ending.append(lease.number)
            self._look_ahead(wait=True)

    def leave(self) -> None:
        """End the pass: release everything. Raises as `Lease.release`."""
        if self._expected is None and not self._holds:
            return
        try:
            self._give_back()
        finally:
            self._stream.order.learn(self._seen)
            self._seen.clear()
            with suppress(SwapdError):
                self._hint(self._room())
            self._expected = None
            self._hinted = False

    def _take(self, part: int) -> Lease:
        asked = self._ahead.get(part)
        if isinstance(asked, Lease):
            return asked
        if asked is not None and (lease := self._collect(asked, part)) is not None:
            return lease
        if not self._stream.passes(part):
            if asked is not None:
                self._drop_ahead(part)  # a kept part stays
                asked = None
            with suppress(Timeout):
                return self._client.leasing.take((self._stream.parts[part],), timeout_s=0)
        for other in [one for one in self._ahead if one != part]:
            self._drop_ahead(other)
        return self._wait(part, asked)

    def _collect(self, request: int, part: int) -> Lease | None:
        with suppress(SwapdError):  # if the session has ended, the acquire will raise it
            name = self._stream.parts[part]
            return self._client.leasing.collect(request, name, within_s=GRANT_S)
        return None

    def _wait(self, part: int, asked: int | None) -> Lease:
        """Wait for a part, in place of the request `asked`.

        The daemon may grant `asked` meanwhile: then the part must not be loaded twice.
        """
        name = self._stream.parts[part]
        with suppress(Deadlock):
            if asked is None:
                return self._client.leasing.take((name,), early=True)
            return self._client.leasing.acquire_in_place_of(asked, name)
        return self._have_anew(part)

    def _have_anew(self, part: int) -> Lease:
        """Release all that this thread holds, and acquire it again together with `part`.

        Other streaming threads do the same, so no thread blocks another.
        """
        take, held = self._client.leasing.take, self._held()
        for lease in held:
            lease.release()
        names = [name for lease in held for name in lease.names]
        with take((*names, self._stream.parts[part])):  # then each can be acquired alone
            if self._rest is not None:
                self._rest = take(self._rest.names)
            for other, lease in list(self._used.items()):
                self._used[other] = take(lease.names)
            return take((self._stream.parts[part],))

    def _look_ahead(self, *, wait: bool = False) -> None:
        """Have requests open for the next parts, and for no others.

        `wait`: wait for slots until the GPU has finished the work before the last block.
        """
        if self._expected is None:
            return
        wanted = list(self._wanted())
        while wait and not wanted and len(self._ending) > 1 and self._needs_more_slots():
            self._client.session.leases.await_end(self._ending[0])
            wanted = list(self._wanted())
        for part in self._ahead.keys() - wanted:
            self._drop_ahead(part)
        for part in filterfalse(self._ahead.__contains__, wanted):
            self._ahead[part] = request = self._client.session.next_id()
            self._client.leasing.ask(request, self._stream.parts[part])
        if not self._hinted and not self._needs_more_slots():
            self._hinted = True  # this pass needs no more slots: the next may have them
            self._hint(self._room())

    def _wanted(self) -> Iterator[int]:
        assert self._expected is not None
        room = self._room()
        seen = set(self._used)
        for i, part in enumerate(dict.fromkeys(self._expected.coming)):
            passes = self._stream.passes(part)
            if part in seen or not (passes or i == 0):
                continue
            if passes and room <= 0:
                return
            seen.add(part)
            room -= passes
            yield part

    def _needs_more_slots(self) -> bool:
        assert self._expected is not None
        return any(map(self._stream.passes, self._expected.coming))

    def _room(self) -> int:
        session = self._client.session
        self._ending = [lease for lease in self._ending if session.leases.is_ending(lease)]
        used = any(map(self._stream.passes, self._used))  # nested blocks take one slot
        return SLOTS - used - len(self._ending)

    def _hint(self, most: int) -> None:
        if self._expected is None or self._client.session.error is not None:
            return
        parts = self._stream.parts
        first = dict.fromkeys(p for p in self._expected.order if self._stream.passes(p))
        names = tuple(parts[p] for p in list(first)[:most] if p not in self._used)
        if names:
            self._client.leasing.hint(*names)

    def _held(self) -> list[Lease]:
        return [*self._used.values(), *([] if self._rest is None else [self._rest])]

    def drop_ahead(self) -> None:
        for part in list(self._ahead):
            self._drop_ahead(part)

    def _drop_ahead(self, part: int) -> None:
        asked = self._ahead[part]
        if isinstance(asked, Lease):
            asked.release()
        else:
            self._channel.abandon(asked)
        del self._ahead[part]

    def _give_back(self) -> None:
        """Release everything, also after errors; raise the first error."""
        problems = []
        for part in list(self._ahead):
            with suppress(SwapdError):  # the session has ended: no daemon to tell
                self._drop_ahead(part)
        for lease in self._held():
            try:
                lease.release()
            except SwapdError as exc:
                problems.append(exc)
        self._ahead.clear()
        self._used.clear()
        self._rest = None
        if problems:
            raise problems[0]


class Order:
    """The expected order of parts: at first that of declaration, then that of the last pass.

    Several threads may use it at once. Passes differ: a step cache skips blocks, a model may call a
    block twice.
    """

    def __init__(self, parts: int) -> None:
        #: The order of the last pass; and of the last complete one, if recent passes skipped parts.
        self._last = self._whole = tuple(range(parts))

    def expected(self) -> "ExpectedParts":
        return ExpectedParts(self._last, self._whole)

    def learn(self, seen: Sequence[int]) -> None:
        if self._last[: len(seen)] == tuple(seen):
            return  # as expected, or ended early: an error says nothing about the next pass
        self._last = tuple(seen)
        rest = iter(self._whole)
        if not all(part in rest for part in seen):
            self._whole = self._last


class ExpectedParts:
    def __init__(self, last: tuple[int, ...], whole: tuple[int, ...]) -> None:
        self.order = last
        self._whole = whole
        self._at = 0

    @property
    def coming(self) -> tuple[int, ...]:
        return self.order[self._at :]

    def used(self, part: int) -> None:
        """Note a use of this part, expected or not, and go on after it."""
        for order, start in ((self.order, self._at), (self._whole, 0)):
            if part in order[start:]:
                self.order, self._at = order, order.index(part, start) + 1
                return
