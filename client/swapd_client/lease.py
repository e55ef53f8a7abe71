"""What the leases of both clients have in common."""

import warnings
from typing import Any

from swapd.shared.protocol import Granted, Placement
from swapd_client.errors import SwapdError
from swapd_client.leases.linger import Held
from swapd_client.session.gpu import empty_cache, handle_of
from swapd_client.session.session import Session


class HeldLease:
    """The right to use components, until it is released.

    On a GPU the release takes effect when the work is done that was on the current stream by
    then, and on the streams named to `uses` or waited with; nobody waits for that.
    """

    #: Beside the current one: those whose work is to be waited for.
    _streams: tuple[int, ...] = ()
    #: Whether a stream was told to wait: then nobody has seen how that ended.
    _streams_wait = False
    #: It is memory for the process's own allocator.
    is_workspace = False
    #: Should it become garbage, somebody gives it back, and nobody need be told.
    is_answered_for = False

    # each client's own sets these
    names: tuple[str, ...]
    _session: Session
    _granted: Granted
    _taken: Held
    _held: bool

    def __repr__(self) -> str:
        state = "held" if self._held else "released"
        return f"<{type(self).__name__} {' + '.join(self.names)} {state}>"

    def __del__(self) -> None:
        if not self._held or self.is_answered_for:
            return
        if self._session.error is None and not self._session.forked:
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2)

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
    def placements(self) -> tuple[Placement, ...]:
        """Where the components are that this process registered."""
        return self._granted.placements

    @property
    def wanted(self) -> bool:
        """Somebody waits for this memory, and its quantum is over: give way soon.

        Costs no message. A busy holder keeps its lease over many steps and looks here at
        the end of each.
        """
        wanted = self._session.wanted
        return bool(wanted) and not wanted.isdisjoint(self._granted.names or self.names)

    def uses(self, stream: Any) -> None:
        """The release is also to wait for the work on `stream`, another than the current one.

        A `torch.cuda.Stream`, anything that has `cuda_stream`, or the driver's handle. Nothing
        on the host device.
        """
        self._streams += (handle_of(stream),)

    def check(self) -> None:
        """Raise if what was computed under this lease is known to be void. Costs no message.

        DeviceFailed: a component never came in, so streams that waited for it went on without.
        DaemonGone and its kind: the session ended before it came in. SessionFenced: others may
        have had the memory for a moment. For a verdict on work that still runs, let the GPU
        finish first.
        """
        if problem := self._session.problem_with(self._granted):
            raise problem

    def _wait_on_stream(self, stream: Any, name: str, segment: int | None) -> None:
        self.check()
        handle = handle_of(stream)
        self._session.wait(self._granted, name, segment, handle)
        self._streams += (handle,)
        self._streams_wait = True

    def _end(self) -> tuple[Held, SwapdError | None]:
        """It is being released: what ends, and what is to be raised when that is done."""
        self._held = False
        if self.is_workspace:
            empty_cache()
        session = self._session
        if session.gpu is None:
            return self._taken, None
        # once each: a lease that lingers takes these over, step after step
        streams = dict.fromkeys((*session.current_streams(), *self._streams))
        problem = session.problem_with(self._granted) if self._streams_wait else None
        work = session.mark(streams)
        return self._taken._replace(streams=tuple(streams), work=work), problem
