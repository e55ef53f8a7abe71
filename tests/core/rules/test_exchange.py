"""An acquire that ends leases gets their room: a stage's layers pass through it, in any company."""

import pytest

from swapd.core.actions import CopyIn, Grant, SendRevoke
from swapd.core.records import Key
from swapd.shared.protocol import Release
from tests.core.world import Make, World, outcome

#: Chunks of the part of a stage that stays for its turn, and of each part that passes through.
REST, PART = 3, 2


class Streamer:
    """A stage whose turn holds `rest` and a window of two parts, which pass in a circle."""

    def __init__(self, w: World, name: str, parts: int = 4) -> None:
        self.w, self.name, self.session = w, name, w.open()
        w.register(self.session, name, REST)
        self.parts = [f"{name}.{i}" for i in range(parts)]
        for part in self.parts:
            w.register(self.session, part, PART, policy="sequential")
        self.window: list[Key] = []

    def ask(self) -> Key:
        return self.w.acquire(self.session, self.name, *self.parts[:2], early=True)

    def begin(self, whole: Key) -> None:
        """The turn was granted whole: a lease for each part of the window, and one of the rest."""
        self.w.settle()
        self.window = [self.w.use(self.session, part) for part in self.parts[:2]]
        self.turn = self.w.use(self.session, self.name)
        self.w.release(whole)
        self.at = 2

    def step(self, *, unmapped: bool = False) -> Key:
        """The oldest part has been used: bring in the next one in its place."""
        done, name = self.window.pop(0), self.parts[self.at % len(self.parts)]
        self.at += 1
        spare = (Release(0, done[1], unmapped=unmapped),)
        key = self.w.acquire(self.session, name, early=True, spare=spare)
        self.window.append(key)
        return key

    def end(self) -> None:
        for key in (*self.window, self.turn):
            self.w.release(key)
        self.w.settle()


def begun(w: World, name: str) -> Streamer:
    streamer = Streamer(w, name)
    streamer.begin(streamer.ask())
    return streamer


def test_a_part_comes_in_where_another_leaves_though_others_wait(make: Make) -> None:
    w = make(REST + 2 * PART)
    a = begun(w, "a")
    other = w.open()
    w.register(other, "small", 1)
    w.register(other, "large", REST + 2 * PART)
    waits = [w.acquire(other, "large", priority=10), w.acquire(other, "small", priority=10)]
    for _ in range(8):
        key = a.step()
        granted = w.answers[key]
        assert isinstance(granted, Grant), "at once"
        assert granted.spent
        w.settle()
    assert not any(map(w.granted, waits))
    a.end()
    assert w.granted(waits[0])


def test_two_streaming_stages_never_hang(make: Make) -> None:
    for chunks in range(REST + 2 * PART, 2 * (REST + 4 * PART) + 2):
        w = make(chunks)
        a, b = Streamer(w, "a"), Streamer(w, "b")
        for _ in range(3):
            asked = [(one, one.ask()) for one in (a, b)]
            w.settle()
            inside = [one for one, key in asked if w.granted(key)]
            for one, key in asked:
                if one in inside:
                    one.begin(key)
            for _ in range(6):
                for one in inside:
                    assert isinstance(w.answers[one.step()], Grant), f"{chunks} chunks"
                w.settle()
            for one in inside:
                one.end()
            late = [(one, key) for one, key in asked if one not in inside]
            for one, key in late:
                assert w.granted(key), f"{chunks} chunks"
                one.begin(key)
                one.end()


def test_a_part_that_its_worker_has_unmapped_needs_no_acknowledgement(make: Make) -> None:
    w = make(REST + 2 * PART, strict=True)
    a = begun(w, "a")
    first = w.core.ledger.components["a.0"].runs
    since = len(w.log)
    a.step(unmapped=True)
    assert not [action for action in w.log[since:] if isinstance(action, SendRevoke)]
    (load,) = [action for action in w.log[since:] if isinstance(action, CopyIn)]
    assert load.runs == first, "the very chunks that became free"


@pytest.mark.parametrize("why", ["mutable", "leased"])
def test_unmapped_counts_for_the_last_lease_of_clean_components_only(make: Make, why: str) -> None:
    w = make(10, strict=True)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=why == "mutable")
    w.register(t, "b", 6)
    key = w.use(s, "a")
    other = w.use(s, "a") if why == "leased" else None
    w.leases.pop(key)
    w.ask(s, Release(0, key[1], unmapped=True))
    if other is not None:
        w.release(other)
    waits = w.acquire(t, "b")
    assert "revoke a (ack)" in outcome(w)
    w.settle()
    assert w.granted(waits)


def test_it_gets_no_more_than_the_room_that_it_gives(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "held", 4)
    w.register(s, "small", 2, policy="sequential")
    w.register(s, "large", 4, policy="sequential")
    w.register(t, "other", 6)
    w.use(s, "held")
    small = w.use(s, "small")
    waits = w.acquire(t, "other")
    asked = w.acquire(s, "large", agent=1, spare=(Release(0, small[1]),))
    w.settle()
    assert w.granted(waits), "it came first"
    assert not w.granted(asked)
