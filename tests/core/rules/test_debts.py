"""A session is fenced if it takes too long to let go of lent memory, or to read."""

from swapd.core.actions import Fence
from tests.core.rules.common import strict_pair
from tests.core.world import Channel, Make, World

CHANNELS: tuple[Channel, ...] = ("lifeline", "replies")


def lending(make: Make) -> tuple[World, int, int, str]:
    """A workspace is being lent; two sessions must let go of its memory."""
    w = make(10, ack_timeout_s=2.0)
    s, t = w.open(), w.open()
    w.workspace(w.open(), 6)
    (move,) = w.moves.values()
    w.ask_to_drop(move.name, s, t)
    return w, s, t, move.name


def test_who_does_not_let_go_of_what_is_lent_is_fenced(make: Make) -> None:
    w, s, t, name = lending(make)
    w.drop(s, 1)
    w.sleep(1.9)
    assert not w.fenced
    (fence,) = w.sleep(0.1)
    assert isinstance(fence, Fence)
    assert fence.session == t
    assert "did not let go of memory lent to others within 2 s" in fence.why
    assert "--ack-timeout" in fence.why
    w.sleep(10.0)
    assert w.fenced == [t]
    w.leave(t)
    w.move(name)
    assert w.core.next_deadline() is None


def test_who_has_let_go_or_is_gone_owes_nothing(make: Make) -> None:
    w, s, t, name = lending(make)
    w.drop(s, 1)
    w.drop(s, 1)
    w.leave(t)
    assert w.core.next_deadline() is None
    w.sleep(10.0)
    assert not w.fenced
    w.move(name)


def test_of_many_lendings_each_is_owed_by_itself(make: Make) -> None:
    w, s, _, _ = lending(make)
    w.workspace(w.open(), 2)
    other = list(w.moves.values())[1]
    w.sleep(1.0)
    w.ask_to_drop(other.name, s)
    w.drop(s, other.generation)
    w.sleep(1.0)
    assert s in w.fenced


def test_who_takes_nothing_that_it_must_hear_is_fenced(make: Make) -> None:
    for channel, things in zip(CHANNELS, ("messages", "replies"), strict=True):
        w = make(10, unread_timeout_s=60.0)
        s, t = w.open(), w.open()
        w.hear(s, 513, channel)
        w.hear(t, 2, channel)
        w.sleep(59.0)
        w.hear(t, 0, channel)
        assert not w.fenced
        (fence,) = w.sleep(1.0)
        assert isinstance(fence, Fence)
        assert fence.session == s
        assert f"does not read: {things} are kept for it, and none taken in 60 s" in fence.why
        assert "its session is ended, connect again" in fence.why
        w.sleep(100.0)
        assert w.fenced == [s]


def test_who_takes_some_now_and_then_goes_on(make: Make) -> None:
    w = make(10, unread_timeout_s=60.0)
    s = w.open()
    for unread in range(9, -1, -1):
        w.hear(s, unread)
        w.sleep(59.0)
    assert not w.fenced
    assert w.core.next_deadline() is None


def test_what_is_read_on_one_channel_is_not_read_on_the_other(make: Make) -> None:
    w = make(10, unread_timeout_s=60.0)
    s = w.open()
    w.hear(s, 3, "replies")
    w.sleep(30.0)
    w.hear(s, 0, "lifeline")
    w.sleep(30.0)
    assert w.fenced == [s]


def test_who_cannot_be_sent_what_it_needs_is_fenced_and_told_why(make: Make) -> None:
    w = make(10, unread_timeout_s=60.0)
    s = w.open()
    w.hear(s, 1, error="Too many open files")
    (fence,) = w.sleep(60.0)
    assert isinstance(fence, Fence)
    assert fence.session == s
    assert fence.why.startswith("cannot be sent its messages for 60 s: Too many open files; ")
    assert "raise the daemon's `ulimit -n`" in fence.why


def test_nothing_is_owed_by_who_is_fenced_or_gone(make: Make) -> None:
    w = make(10, ack_timeout_s=2.0, unread_timeout_s=60.0)
    s, t = w.open(), w.open()
    w.hear(s, 3)
    w.hear(t, 3)
    w.leave(t)
    w.sleep(60.0)
    w.hear(s, 5)
    assert w.core.next_deadline() is None
    w.leave(s)
    w.hear(s, 5)
    assert w.core.next_deadline() is None


def test_a_session_is_fenced_once_whatever_it_owes(make: Make) -> None:
    w, s, t, _ = lending(make)
    for channel in CHANNELS:
        w.hear(s, 3, channel)
    w.sleep(100.0)
    assert w.fenced == [s, t]


def test_who_is_fenced_for_no_acknowledgement_owes_nothing_else(make: Make) -> None:
    w, s, t = strict_pair(make, ack_timeout_s=2.0)
    w.hear(s, 3)
    w.acquire(t, "b")
    w.sleep(2.0)
    assert w.fenced == [s]
    assert w.core.next_deadline() is None
