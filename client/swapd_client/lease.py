"""Leases, as their holders see them; and what gives them, as models that are attached see it."""

import asyncio
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol

from swapd.shared.protocol import ForecastReply, Granted, Placement, Policy
from swapd_client.errors import DeviceFailed, SessionEnded, SwapdError, UnknownComponent
from swapd_client.leases.book import Record
from swapd_client.leases.keeping import Key
from swapd_client.memory.component import Component
from swapd_client.memory.layout import Segments
from swapd_client.memory.sources import Source
from swapd_client.session.channel import Channel
from swapd_client.session.gpu.streams import empty_cache, handle_of
from swapd_client.session.session import Session


class BaseLease:
    """The right to use components, until it is released.

    On a GPU the release takes effect when the work is done that was on the current stream by
    then, and on the streams named to `uses` or waited with; nobody waits for that.
    """

    #: Whether a stream was told to wait: then nobody has seen how that ended.
    _streams_wait = False
    #: Should it become garbage, somebody gives it back, and nobody need be told.
    _is_answered_for = False
    #: What was said of scratch, by name.
    _fresh: Mapping[str, bool] = {}

    # each kind of lease sets these
    names: tuple[str, ...]
    _session: Session
    _record: Record
    #: As it was granted to this holder: a lease that was kept was waited for by another.
    _granted: Granted
    _held: bool

    def __repr__(self) -> str:
        state = "held" if self._held else "released"
        return f"<{type(self).__name__} {' + '.join(self.names)} {state}>"

    def __del__(self) -> None:
        if not self._held or self._is_answered_for:
            return
        if self._session.error is None and not self._session.forked:
            warnings.warn(
                f"{self!r} was never released, so nobody else gets that memory while this session "
                "lasts: use it in a `with` block, or call release()",
                ResourceWarning,
                stacklevel=2,
            )

    @property
    def waited_s(self) -> float:
        """Seconds from the request's arrival at the daemon to the grant."""
        return self._granted.waited_s

    @property
    def loaded(self) -> bool:
        """Whether a copy had to be made, or waited for."""
        return self._granted.loaded

    @property
    def number(self) -> int:
        """What the daemon calls it; no other lease of this client is called so."""
        return self._granted.id

    @property
    def _placements(self) -> tuple[Placement, ...]:
        """Where the components are that this process registered."""
        return self._granted.placements

    @property
    def wanted(self) -> bool:
        """Somebody waits for this memory, and its quantum is over: give way soon.

        Costs no message. A busy holder keeps its lease over many steps and looks here at
        the end of each.
        """
        wanted = self._session.told.wanted
        return bool(wanted) and not wanted.isdisjoint(self._granted.names or self.names)

    def fresh(self, name: str) -> bool:
        """Whether the contents of scratch are new: zeros, and nothing of what was there before.

        True for the first lease that is asked, each time that they have begun anew; and each time
        that this one is asked again. Ask before you use what was there. `name` may be a family's;
        of what is no scratch the contents are never new. Costs no message. Raises: UnknownComponent
        if it is not in this lease, or is another process's.
        """
        if name not in self._fresh:
            known = self._session.registry.family(name) or [name]
            if not any(self._record.holds(part) for part in known):
                raise UnknownComponent(
                    f"{name!r} is not in this lease, which is of {', '.join(self.names)}, or it is "
                    "another process's: only that can ask whether it is new"
                )
            self._fresh = {**self._fresh, name: self._session.leases.is_fresh(self._record, name)}
        return self._fresh[name]

    def uses(self, stream: Any) -> None:
        """The release is also to wait for the work on `stream`, another than the current one.

        A `torch.cuda.Stream`, anything that has `cuda_stream`, or the driver's handle; it must not
        be destroyed before the release, or `rests`. Nothing on the host device.
        """
        self._record.streams[handle_of(stream)] = None

    def rests(self) -> None:
        """A step under it is over: the release waits for what the current stream has been given by
        now, and the streams named to `uses`, whatever becomes of these. Costs no message."""
        if self._session.processor.works_late:
            self._session.leases.mark(self._record)

    def check(self) -> None:
        """Raise if what was computed under this lease is known to be void. Costs no message.

        DeviceFailed: a component never came in, so streams that waited for it went on without.
        SessionEnded: the session ended before it came in. SessionFenced: others may
        have had the memory for a moment. For a verdict on work that still runs, let the GPU
        finish first.
        """
        if problem := self._session.leases.problem_with(self._record):
            raise problem

    def _wait_on_stream(self, stream: Any, name: str, segment: int | None) -> None:
        self.check()
        handle = handle_of(stream)
        self._session.leases.wait(self._record, name, segment, handle)
        self._record.streams[handle] = None
        self._streams_wait = True

    def _end(self) -> SwapdError | None:
        """It is being released: what is to be raised when that is done."""
        self._held = False
        record, leases = self._record, self._session.leases
        if record.is_workspace:
            empty_cache()
        if not self._session.processor.works_late:
            return None
        problem = leases.problem_with(record) if self._streams_wait else None
        leases.mark(record)
        return problem


class Lender(Protocol):
    """A client, as what is attached to it needs it; what begins with _ is for `offload` alone.

    Blocking and errors are those of `Client`.
    """

    session: Session

    def register(
        self,
        name: str,
        source: Source,
        *,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
        part_of: str = "",
    ) -> Component:
        """A component, from now on."""

    def register_family(
        self,
        name: str,
        parts: Mapping[str, Source],
        *,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
    ) -> list[Component]:
        """A component in parts."""

    def unregister(self, name: str) -> None:
        """A component, or a family, no more."""

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
    ) -> "Lease":
        """All of `names`, held."""

    def forecast(self, *names: str, timeout: float | None = None) -> ForecastReply:
        """What `acquire` would do."""

    def _release(self, record: Record, key: Key) -> None:
        """A lease ends, or is kept for a moment."""

    def _channel(self) -> Channel:
        """What this thread asks on: nothing that it asked is lost while somebody has it."""

    def _ask(self, *names: str) -> int:
        """Ask for components ahead, and go on."""

    def _collect(self, request: int, *names: str, within_s: float) -> "Lease | None":
        """The lease that was asked for ahead; None if it is not granted within that."""

    def _acquire_in_place_of(self, request: int, *names: str) -> "Lease":
        """What was asked for ahead and not collected, by waiting for it."""

    def _hint(self, *names: str, over: Collection[str] | None = None) -> None:
        """As a prefetch, and nobody hears what becomes of it."""

    def _update_together(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """New values for several components, in one step."""

    def _refuse_in_use(self, names: Collection[str]) -> None:
        """Raise ComponentInUse if anybody leases one of these."""

    def _forget(self, attachment: Any) -> None:
        """It is detached."""


class Lease(BaseLease):
    """The right to use components; while it is held their bytes neither move nor change.

    Ends with `release` or with the `with` block, exceptions included. Released twice is
    released once. A lease belongs to the thread that took it: while that thread waits for
    another acquire, the daemon assumes that it releases nothing.
    """

    # made at every step of a decode loop, so all of it here
    def __init__(self, lender: "Lender", session: Session, record: Record, key: Key) -> None:
        self._lender = lender
        self._session = session
        self._record = record
        self._granted = record.granted
        self._key = key
        self.names = key[1]
        self._held = True

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with suppress(SessionEnded, DeviceFailed) if exc is not None else nullcontext():
            self.release()

    def wait(
        self, segment: int | None = None, *, name: str | None = None, stream: Any = None
    ) -> None:
        """Wait until a segment, and those before it, are on the device; None: all of them.

        Returns at once unless the lease was acquired `early`. `name` says of which component,
        if the lease has several. Raises: DeviceFailed if it will never come (release the lease,
        then acquire anew); SessionEnded if the session ended meanwhile.

        With `stream` (as for `uses`) it is that stream that waits, and this returns at once:
        work that is put on it afterwards starts when the segment is there. If it will never
        come, or the daemon dies, the stream goes on all the same; the next `wait`, `check` or
        the `release` then says so, and what was computed is void. On the host device, and on
        GPUs whose streams cannot wait for flags, the caller waits instead.
        """
        if stream is None:
            self._session.leases.wait(self._record, name or self.names[0], segment)
        else:
            self._wait_on_stream(stream, name or self.names[0], segment)

    def release(self) -> None:
        """Give the components back. Does not block, from the thread that acquired; but once in some
        hundred messages until the daemon has heard them, for some seconds if it is stopped.

        On a GPU it takes effect when the work is done that was put on the current stream by
        now, and on the streams named to `uses` and `wait`; a thread of the client waits for it.

        Does nothing if the daemon is gone. Raises: ForkedClient; SessionFenced if the daemon
        ended the session while this was held (see its log): then discard what was computed
        since, for others may have had the memory for a moment. If streams were told to wait,
        also what `check` raises.
        """
        if not self._held:
            return
        if self._record.ends_at_once:  # as most of a loop's
            self._held = False
            self._lender._release(self._record, self._key)
            return
        problem = self._end()
        self._lender._release(self._record, self._key)
        if problem is not None:
            raise problem


class AsyncLease(BaseLease):
    """As `swapd_client.Lease`; belongs to the task that took it. `release` never blocks."""

    def __init__(
        self,
        session: Session,
        record: Record,
        give_back: Callable[[Record], None],
    ) -> None:
        """`give_back(record)` ends it, when the work under it is done."""
        self._session = session
        self._record = record
        self._granted = record.granted
        self._give_back = give_back
        self.names = record.names
        self._held = True

    async def wait(
        self, segment: int | None = None, *, name: str | None = None, stream: Any = None
    ) -> None:
        """As `Lease.wait`; in a thread if it must wait."""
        if stream is None:
            name = name or self.names[0]
            await asyncio.to_thread(self._session.leases.wait, self._record, name, segment)
        else:
            # in a thread too: where a stream cannot wait, whoever calls does
            name = name or self.names[0]
            await asyncio.to_thread(self._wait_on_stream, stream, name, segment)

    def release(self) -> None:
        """Give the components back. Raises what `Lease.release` raises."""
        if self._held:
            problem = self._end()
            self._give_back(self._record)
            if problem is not None:
                raise problem

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with suppress(SessionEnded, DeviceFailed) if exc is not None else nullcontext():
            self.release()
