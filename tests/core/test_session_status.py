"""The status of a session."""

from swapd.core import Residency, status
from swapd.core.events import SessionOpened, Unread


def test_a_session_that_does_not_read_is_told_from_one_that_does() -> None:
    core = Residency(4, 1)
    core.handle(SessionOpened(0.0, 1, "thinker"))
    assert not status.session_status(core.ledger, 1).unread
    for channel in ("lifeline", "replies"):
        core.handle(Unread(1.0, 1, channel, 2))
        assert status.session_status(core.ledger, 1).unread
        core.handle(Unread(2.0, 1, channel, 0))
        assert not status.session_status(core.ledger, 1).unread
