"""Leases that an agent keeps, and does not use, wait for nobody and hold nobody up."""

from random import Random

import pytest

from swapd.core.records import NOBODY
from swapd.shared.protocol import LEASES_MAX, Acquire, Release, decode_request, encode
from tests.core.driver import RandomChoices, wind_up
from tests.core.world import Make, World


def test_what_an_agent_keeps_is_no_part_of_a_deadlock(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name in ((s, "a"), (t, "b"), (s, "a2"), (t, "b2")):
        w.register(session, name, 5)
    kept_s, kept_t = w.use(s, "a"), w.use(t, "b")
    first, second = w.acquire(s, "a2", holds=()), w.acquire(t, "b2", holds=())
    assert not {first, second} & w.answers.keys()
    assert {(s, "a"), (t, "b")} <= w.wanted | {(k, n) for k in w.hurried for n in "ab"}
    w.release(kept_s)
    w.release(kept_t)
    w.settle()
    assert w.granted(first, second)


def test_what_an_agent_has_in_use_is(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b", "c"):
        w.register(s, name, 5)
    held, kept = w.use(s, "a"), w.use(s, "b")
    refusal = w.refusal(w.acquire(s, "c", "b", holds=(held[1],)))
    assert refusal.code == "deadlock"
    w.release(held)
    w.release(kept)


def test_a_kept_lease_that_is_in_use_again_counts_again(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b", "c"):
        w.register(s, name, 5 if name != "c" else 1)
    kept = w.use(s, "a")
    w.release(w.use(s, "c", holds=()))
    assert w.ledger.leases[kept].agent == NOBODY
    w.release(w.use(s, "c", holds=(kept[1],)))
    assert w.ledger.leases[kept].agent == 0
    w.register(s, "large", 10)
    assert w.refusal(w.acquire(s, "large", holds=(kept[1],))).code == "deadlock"
    w.release(kept)


def test_what_was_asked_for_ahead_is_part_of_a_deadlock_once_in_use(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 6)
    ahead = w.use(s, "a", agent=-1)
    assert w.refusal(w.acquire(s, "b", holds=(ahead[1],))).code == "deadlock"
    w.release(ahead)


def test_without_a_word_an_agent_uses_all_its_leases(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    held = w.use(s, "a")
    assert w.refusal(w.acquire(s, "b")).code == "deadlock"
    w.release(held)


def test_a_kept_lease_gets_nobody_the_old_bytes(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 4)
    kept = w.use(s, "a")
    w.renew(s, "a")
    asked = w.acquire(s, "a", holds=())
    w.settle()
    assert asked not in w.leases, "it waits for the new bytes"
    w.release(kept)
    w.settle()
    assert w.granted(asked)


@pytest.mark.parametrize("is_in", [True, False])
def test_spare_leases_end_if_the_request_needs_a_load_and_only_then(
    make: Make, is_in: bool
) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 4 if is_in else 10)
    if is_in:
        w.touch(s, "b")
    spare = w.use(s, "a")
    asked = w.acquire(s, "b", holds=(), spare=(Release(0, spare[1], again=3, idle_s=0.5),))
    w.settle()
    assert w.granted(asked)
    assert (spare in w.ledger.leases) == is_in
    assert w.answers[asked].spent != is_in  # type: ignore[union-attr]


def test_the_least_recently_used_goes_by_when_it_was_used(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 5)
    first, second = w.use(s, "a"), w.use(s, "b")
    w.sleep(5.0)
    w.leases.pop(second)
    w.ask(s, Release(0, second[1], again=1, idle_s=1.0, gap_s=0.1))
    w.leases.pop(first)
    w.ask(s, Release(0, first[1], again=1, idle_s=3.0, gap_s=0.1))
    assert [w.ledger.components[n].last_used for n in "ab"] == [w.now - 3.0, w.now - 1.0]
    assert w.ledger.components["a"].gap_s == 0.1


def test_too_many_leases_in_a_message_are_no_request() -> None:
    for asked in (
        Acquire(1, ("a",), holds=tuple(range(LEASES_MAX + 1))),
        Acquire(1, ("a",), spare=(Release(1, 1),) * (LEASES_MAX + 1)),
    ):
        with pytest.raises(ValueError, match="length"):
            decode_request(encode(asked))


class _Thread:
    """An agent that takes leases, keeps some of them, and gives back what is wanted."""

    def __init__(self, w: World, session: int, number: int) -> None:
        self.w, self.session, self.number = w, session, number
        self.asked: tuple[int, int] | None = None
        self.in_use: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []

    def step(self, random: Random) -> None:
        w = self.w
        if self.asked is not None:
            if self.asked in w.leases:
                self.in_use.append(self.asked)
            elif self.asked not in w.answers:
                return self.give_way()
            self.asked = None
        if self.in_use and random.random() < 0.6:
            key = self.in_use.pop()
            self.kept.append(key) if random.random() < 0.7 else w.release(key)
        elif len(self.in_use) < 2:
            spare = tuple(Release(0, key[1]) for key in self.kept if random.random() < 0.3)
            self.asked = w.acquire(
                self.session,
                random.choice("abcdef"),
                agent=self.number,
                holds=tuple(number for _, number in self.in_use),
                spare=spare,
            )
            self.kept = [key for key in self.kept if key in w.ledger.leases]
        self.give_way()

    def give_way(self) -> None:
        w = self.w
        for key in list(self.kept):
            if self.session in w.hurried or any((self.session, n) in w.wanted for n in "abcdef"):
                self.kept.remove(key)
                w.release(key)


@pytest.mark.parametrize("seed", range(30))
def test_no_deadlock_is_missed_and_none_is_false(seed: int, make: Make) -> None:
    """Each refusal is checked by the agents' leases in use alone: without what they keep."""
    w, random = make(10), Random(seed)
    sessions = [w.open() for _ in range(2)]
    for i, name in enumerate("abcdef"):
        w.register(sessions[i % 2], name, 3)
    for name, after in zip("bcdefa", "abcdef", strict=True) if seed % 2 else ():
        w.follows(sessions[0], name, after=after)
    threads = [_Thread(w, s, number) for s in sessions for number in (1, 2)]
    for _ in range(150):
        thread = random.choice(threads)
        waiting = [t for t in threads if t.asked is not None and t.asked not in w.answers]
        thread.step(random)
        for t in threads:
            if t.asked is None or t.asked not in w.answers or t.asked in w.leases:
                continue
            answer = w.answers[t.asked]
            assert answer.code == "deadlock"  # type: ignore[union-attr]
            # those that wait hold so much in use that no more fits: else it was false
            holds = [t2.in_use for t2 in threads if t2 in waiting or t2 is t]
            held = {n for keys in holds for key in keys for n in w.leases.get(key, ())}
            assert 3 * len(held) > 10 - 3, f"{held}: it had room"
        w.settle() if random.random() < 0.5 else None
    for thread in threads:
        thread.give_way()
    wind_up(w)


def test_any_history_with_kept_leases_ends_well() -> None:
    """Random moves, in which agents have any of their leases in use."""
    from tests.core import driver

    for seed in range(10):
        w = World(10)
        choose = RandomChoices(seed)
        bag = [move for move, often in driver.MOVES.items() for _ in range(often)]
        for _ in range(2):
            w.open()
        for _ in range(6):
            driver.register(w, choose)
        for _ in range(100):
            w.keeps = choose.chance(2)
            choose.pick(bag)(w, choose)
        wind_up(w)


@pytest.mark.parametrize(("idle_s", "goes"), [(2.5, "a"), (0.0, "b")])
def test_the_order_of_eviction_goes_by_the_last_use_not_by_the_release(
    make: Make, idle_s: float, goes: str
) -> None:
    w = make(4)
    s = w.open()
    for name in "abc":
        w.register(s, name, 2)
    kept, used = w.use(s, "a"), w.use(s, "b")
    w.sleep(1.0)
    w.sleep(1.0)
    w.release(used)
    w.sleep(1.0)
    w.leases.pop(kept)
    w.ask(s, Release(0, kept[1], idle_s=idle_s))
    w.touch(s, "c")
    assert w.evictions() == [goes]
