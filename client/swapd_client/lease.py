"""What the leases of both clients have in common."""

import warnings
from collections.abc import Iterable
from typing import Any

from swapd import protocol
from swapd_client.errors import SwapdError
from swapd_client.gpu import empty_cache, handle_of
from swapd_client.session import Session


class HeldLease:
    """The right to use components, until it is released.

    On a GPU the release takes effect when the work is done that was on the current stream by
    then, and on the streams named to `uses` or waited with; nobody waits for that.
    """

    def __init__(
        self,
        session: Session,
        granted: protocol.Granted,
        names: tuple[str, ...],
        *,
        streams: Iterable[int] = (),
        workspace: bool = False,
    ) -> None:
        self.names = names
        #: Seconds from the request's arrival at the daemon to the grant.
        self.waited_s = granted.waited_s
        #: Whether a copy had to be made, or waited for.
        self.loaded = granted.loaded
        self._session = session
        self._granted = granted
        self._workspace = workspace
        self._held = True
        self._streams = list(streams)
        #: Whether a stream was told to wait: then nobody has seen how that ended.
        self._streams_wait = False

    def __repr__(self) -> str:
        state = "held" if self._held else "released"
        return f"<{type(self).__name__} {' + '.join(self.names)} {state}>"

    def __del__(self) -> None:
        if self._held and self._session.error is None:
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2)

    @property
    def wanted(self) -> bool:
        """Somebody waits for this memory, and its quantum is over: give way soon.

        Costs no message. A busy holder keeps its lease over many steps and looks here at
        the end of each.
        """
        wanted = self._session.wanted
        return bool(wanted) and not wanted.isdisjoint(self.names)

    def uses(self, stream: Any) -> None:
        """The release is also to wait for the work on `stream`, another than the current one.

        A `torch.cuda.Stream`, anything that has `cuda_stream`, or the driver's handle. Nothing
        on the host device.
        """
        self._streams.append(handle_of(stream))

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
        self._streams.append(handle)
        self._streams_wait = True

    def _close(self) -> SwapdError | None:
        """It is being released; what is to be raised when it is."""
        self._held = False
        if self._workspace:
            empty_cache()
        return self._session.problem_with(self._granted) if self._streams_wait else None

    def _all_streams(self) -> tuple[int, ...]:
        """Those whose work must be done before a lease that is released now ends."""
        # once each: a lease that lingers takes these over, step after step
        return tuple(dict.fromkeys((*self._session.current_streams(), *self._streams)))
