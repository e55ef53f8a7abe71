"""A forecast predicts the acquire, and changes nothing itself."""

import pickle

import pytest

from swapd.core import Residency, status
from swapd.core.actions import AnyAction, CopyIn, CopyOut, Evict, Refuse
from swapd.core.records import Key
from swapd.core.status import forecast
from swapd.shared import protocol
from tests.core import driver
from tests.core.arena import places
from tests.core.driver import Choices
from tests.core.world import World

Answer = protocol.Forecast | protocol.Refused


def ask(w: World, session: int, *names: str) -> Answer:
    """Ask, and check that asking changed nothing."""
    before = pickle.dumps((w.ledger.__dict__, list(w.core.ledger.queue)))
    answer = forecast(w.core, protocol.ForecastRequest(1, names), session, w.now)
    assert pickle.dumps((w.ledger.__dict__, list(w.core.ledger.queue))) == before
    return answer


def told(w: World, session: int, *names: str) -> protocol.Forecast:
    answer = ask(w, session, *names)
    assert isinstance(answer, protocol.Forecast), answer
    return answer


@pytest.fixture
def w() -> World:
    world = World(10, residency_bound_s=0.5)
    world.open("worker")
    world.open("other")
    return world


def pair(w: World) -> tuple[int, int]:
    first, second = sorted(w.sessions)
    return first, second


# --- answers -----------------------------------------------------------------------------


def test_what_is_in_costs_nothing(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "a", 4)
    w.touch(one, "a")
    answer = told(w, one, "a")
    assert (answer.bytes_in, answer.victims, answer.seconds) == (0, (), 0.0)
    assert answer.at_once


def test_a_family_is_foretold_by_its_name(w: World) -> None:
    one, _ = pair(w)
    for name in ("f/1", "f/2"):
        w.register(one, name, 4, part_of="f")
    w.touch(one, "f/1")
    assert told(w, one, "f").bytes_in == 4


def test_what_is_absent_is_copied_in_and_none_goes_needlessly(w: World) -> None:
    one, two = pair(w)
    for name, nbytes in (("a", 4), ("b", 5), ("c", 6)):
        w.register(one, name, nbytes)
    w.touch(one, "a")
    w.touch(one, "b")
    answer = told(w, two, "c")
    assert answer.bytes_in == 6
    assert answer.victims == (protocol.Victim("b", 5, 0, "room"),)  # enough without "a"


def test_a_mutable_victim_is_written_back(w: World) -> None:
    one, two = pair(w)
    w.register(one, "m", 6, mutable=True)
    w.register(two, "c", 6)
    w.touch(one, "m")
    answer = told(w, two, "c")
    assert answer.victims == (protocol.Victim("m", 6, 6, "room"),)
    assert answer.bytes_back == 6


def test_a_rival_goes_though_there_is_room(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "x", 2, "alternating", "g")
    w.register(one, "y", 2, "alternating", "g")
    w.touch(one, "x")
    assert told(w, one, "y").victims == (protocol.Victim("x", 2, 0, "alternating"),)


def test_who_holds_what_must_go_is_named(w: World) -> None:
    one, two = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 6)
    w.use(one, "a")
    answer = told(w, two, "b")
    assert not answer.at_once
    assert answer.waits_for == (protocol.Blocker("a", f"leased by worker (session {one})"),)
    assert answer.victims == ()


def test_who_is_first_in_the_queue_is_named(w: World) -> None:
    one, two = pair(w)
    for name in ("a", "b", "c"):
        w.register(one, name, 6)
    w.use(one, "a")
    w.acquire(two, "b")
    answer = told(w, one, "c")
    assert [way.name for way in answer.waits_for] == ["b"]
    assert "other (session" in answer.waits_for[0].why


def test_what_is_busy_is_kept_and_for_how_long(w: World) -> None:
    one, two = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 6)
    key = w.acquire(one, "a")
    w.now += 0.4
    w.settle()
    w.release(key)
    w.release(w.acquire(one, "a"))
    answer = told(w, two, "b")
    assert [way.name for way in answer.waits_for] == ["a"]
    assert "kept for another 200 ms" in answer.waits_for[0].why
    w.now += 0.3
    assert told(w, two, "b").at_once


def test_what_is_leaving_comes_back_when_it_has_left(w: World) -> None:
    one, two = pair(w)
    w.register(one, "m", 6, mutable=True)
    w.register(two, "c", 6)
    w.touch(one, "m")
    w.acquire(two, "c")
    answer = told(w, one, "m")
    assert not answer.at_once
    assert answer.bytes_in == 6


def test_what_is_promised_to_another_is_said(w: World) -> None:
    one, two = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 6)
    w.acquire(two, "a")
    (way,) = told(w, one, "b").waits_for
    assert way == protocol.Blocker("a", f"coming in for other (session {two})")


def test_parts_of_a_family_are_asked_for_and_in_the_way_as_one(w: World) -> None:
    one, two = pair(w)
    for i in range(3):
        w.register(one, f"dit/{i}", 2, part_of="dit")
    w.register(two, "a", 6)
    assert told(w, two, "dit").bytes_in == 6
    w.touch(one, "dit")
    assert {v.part_of for v in told(w, two, "a").victims} == {"dit"}
    w.use(one, "dit/0", "dit/1", "dit/2")
    (way,) = told(w, two, "a").waits_for
    assert way.name == "dit"


def scratch(w: World, kind: protocol.Scratch, *said: protocol.Ranges) -> tuple[int, int]:
    """Scratch that was used, of 6, and another component of 6."""
    one, two = pair(w)
    w.register(one, "kv", 6, scratch=kind)
    w.register(two, "c", 6)
    key = w.use(one, "kv")
    w.release(key, used=tuple(protocol.UsedRanges("kv", i, r) for i, r in enumerate(said, 1)))
    return one, two


def test_scratch_that_is_dropped_is_evicted_without_a_copy(w: World) -> None:
    _, two = scratch(w, "dropped")
    answer = told(w, two, "c")
    assert answer.victims == (protocol.Victim("kv", 6, 0, "room"),)
    assert answer.bytes_back == 0


def test_of_scratch_what_is_used_is_written_back_and_copied_in(w: World) -> None:
    one, two = scratch(w, "saved", ((0, 1), (3, 1)))
    assert told(w, two, "c").bytes_back == 2
    w.acquire(two, "c")
    leaving = told(w, one, "kv")
    assert not leaving.at_once
    assert leaving.bytes_in == 2, "what is being saved now"
    w.settle()
    w.release(next(iter(w.leases)))
    assert told(w, one, "kv").bytes_in == 2


def test_scratch_that_begins_anew_takes_no_time_though_nothing_was_measured(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "kv", 6, scratch="dropped")
    answer = told(w, one, "kv")
    assert (answer.bytes_in, answer.seconds, answer.bytes_per_s) == (0, 0.0, None)


def test_what_scratch_took_says_nothing_of_how_fast_copies_are(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "kv", 6, scratch="dropped")
    w.register(one, "a", 6)
    load(w, one, "kv", 0.001)
    assert told(w, one, "a").seconds is None


def test_scratch_takes_as_long_as_what_is_copied_of_it_this_time(w: World) -> None:
    one, two = scratch(w, "saved", ((0, 4),))
    key = w.acquire(two, "c")
    w.ack("kv")
    w.move("kv")
    w.now += 3.0
    w.move("c")
    w.release(key)
    assert w.ledger.components["kv"].copy_s == 0.0, "when it was zeroed"
    assert told(w, one, "kv").seconds == pytest.approx(2.0)


# --- refusals ----------------------------------------------------------------------------


def refused(answer: Answer) -> str:
    assert isinstance(answer, protocol.Refused)
    return answer.code


def test_what_the_acquire_would_be_refused_for_is_the_answer(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 6)
    w.register(one, "x", 2, "alternating", "g")
    w.register(one, "y", 2, "alternating", "g")
    assert refused(ask(w, one, "nobody")) == "unknown_component"
    assert refused(ask(w, one, "a", "b")) == "too_large"
    assert refused(ask(w, one, "x", "y")) == "conflict"
    w.stop()
    assert refused(ask(w, one, "a")) == "stopping"


# --- durations ---------------------------------------------------------------------------


def test_nothing_measured_is_nothing_foretold(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "a", 4)
    answer = told(w, one, "a")
    assert answer.seconds is None
    assert answer.bytes_per_s is None


def load(w: World, session: int, name: str, seconds: float) -> None:
    key = w.acquire(session, name)
    w.now += seconds
    w.settle()
    w.release(key)


def test_its_own_last_swap_in_says_how_long(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 6)
    load(w, one, "a", 3.0)
    load(w, one, "b", 1.0)
    assert told(w, one, "a").seconds == pytest.approx(3.0)


def test_else_the_rate_of_the_others_does(w: World) -> None:
    one, _ = pair(w)
    w.register(one, "a", 6)
    w.register(one, "b", 3)
    load(w, one, "a", 3.0)
    answer = told(w, one, "b")
    assert answer.bytes_per_s == pytest.approx(2.0)
    assert answer.seconds == pytest.approx(1.5)


def test_what_a_copy_waited_for_others_is_not_its_own_time(w: World) -> None:
    one, two = pair(w)
    for name in ("a", "b", "c"):
        w.register(one, name, 5)
    first, second = w.acquire(one, "a"), w.acquire(two, "b")
    w.now += 1.0
    w.move("a")
    w.now += 2.0
    w.move("b")
    w.release(first)
    w.release(second)
    assert w.ledger.components["b"].swap_in_s == pytest.approx(3.0)
    answer = told(w, one, "c")
    assert answer.bytes_per_s == pytest.approx(10 / 3.0)
    load(w, one, "c", 1.0)
    load(w, two, "a", 1.0)
    assert told(w, one, "b").seconds == pytest.approx(2.0)


def test_what_is_on_its_way_already_comes_first(w: World) -> None:
    one, two = pair(w)
    for name, nbytes in (("a", 2), ("b", 4), ("c", 4)):
        w.register(one, name, nbytes)
    load(w, one, "a", 1.0)
    w.acquire(two, "b")
    w.now += 0.5
    assert told(w, one, "c").seconds == pytest.approx(2.0 - 0.5 + 2.0)
    coming = told(w, one, "b")
    assert (coming.bytes_in, coming.bytes_coming) == (0, 4)
    assert coming.seconds == pytest.approx(1.5)


# --- in any state ------------------------------------------------------------------------


#: Releases and ends of copies are frequent, so that some acquires can be granted at once.
CALM: dict[driver.Move, int] = {
    driver.open_session: 1,
    driver.leave: 1,
    driver.exit_process: 1,
    driver.register: 5,
    driver.unregister: 1,
    driver.acquire: 2,
    driver.acquire_workspace: 1,
    driver.release: 30,
    driver.come_back: 5,
    driver.cancel: 8,
    driver.prefetch: 1,
    driver.end_master: 4,
    driver.end_move: 24,
    driver.end_ack: 24,
    driver.sleep: 3,
}


class Foresight:
    """Asks before every acquire of its own; the acquire must then match the forecast."""

    def __init__(self) -> None:
        #: How often it forecast evictions, refusals, and waits.
        self.victims = self.refused = self.waits = 0

    def __call__(self, w: World, choose: Choices) -> bool:
        if not w.sessions or not w.owner:
            return False
        session = choose.pick(sorted(w.sessions))
        names = [choose.pick(sorted(w.owner)) for _ in range(choose.pick((1, 1, 1, 2)))]
        answer = ask(w, session, *names)
        for wait in status.waits(w.core, w.now):
            assert (wait.seconds is None) == bool(wait.unknown)
        key = w.acquire(session, *names, agent=99)
        reply, done = w.answers.get(key), list(w.out)
        if isinstance(answer, protocol.Refused):
            self.refused += 1
            assert isinstance(reply, Refuse)
            assert reply.code == answer.code
        elif answer.at_once:
            self.victims += bool(answer.victims)
            self._did_as_told(answer, key, done)
            assert not isinstance(reply, Refuse)
        else:
            self.waits += 1
        if choose.chance(3):
            w.cancel(key)
        return True

    def _did_as_told(self, answer: protocol.Forecast, key: Key, done: list[AnyAction]) -> None:
        evicted = [a for a in done if isinstance(a, Evict) and a.waiter == key]
        assert [(a.name, a.reason) for a in evicted] == [(v.name, v.reason) for v in answer.victims]
        saved = {v.name for v in answer.victims if v.bytes_back}
        assert {a.name for a in done if isinstance(a, CopyOut)} <= saved
        loads = [a for a in done if isinstance(a, CopyIn) and not a.joins]
        coming = [a for a in loads if a.name in answer.names]
        copied = sum(len(places(a.only, a.nbytes)) for a in coming)
        assert copied in (0, answer.bytes_in)


@pytest.mark.timeout(1.1 * driver.EXAMPLES)
@pytest.mark.parametrize("strict", [False, True])
def test_an_acquire_does_what_was_foretold_in_whatever_state(strict: bool) -> None:
    foresight = Foresight()
    seeds = driver.seeds(16)
    for seed in seeds:
        moves: dict[driver.Move, int] = {**CALM, foresight: 16}
        driver.drive(Residency, seed, steps=400, strict=strict, moves=moves)
    assert foresight.victims > 4 * len(seeds)
    assert foresight.refused > len(seeds)
    assert foresight.waits > len(seeds)


def test_it_does_not_wait_for_the_copies_of_prefetches() -> None:
    w = World(40)
    s = w.open("worker")
    for name in ("measured", "guess", "demand", "asked"):
        w.register(s, name, 8)
    key = w.acquire(s, "measured")
    w.sleep(1.0)
    w.settle()
    w.release(key)
    w.prefetch(s, "guess")
    w.acquire(s, "demand", agent=1)
    assert told(w, s, "asked").seconds == pytest.approx(2.0)
    assert told(w, s, "guess").seconds == pytest.approx(2.0), "it would be second"
