"""`swapd plan --from-log` finds the settings under which a recorded run waits least."""

from collections.abc import Callable
from functools import cache
from itertools import product

import msgspec
import pytest

from swapd.replay import search
from swapd.replay.search import WORTH, Point, ReplayCost, Setting, cost_of, run_at, settings_of
from swapd.replay.work import RecordedWork
from swapd.shared import protocol
from tests.replayed import LRU, RATE, Site
from tests.test_replay_again import rivals


def cycle() -> RecordedWork:
    site = Site(8)
    site.thread("a", "b", "c", uses=18, hold_s=1.0)
    return site.work()


def crowd() -> RecordedWork:
    """A small component that is often used, beside threads that push it out."""
    site = Site(9, msgspec.structs.replace(LRU, overtake=0))
    site.thread("often", uses=12, hold_s=0.2, gap_s=1.5, size=2)
    site.thread("a", "b", uses=8, hold_s=1.0, gap_s=0.5, at=0.3)
    site.thread("c", uses=6, hold_s=0.5, gap_s=0.7, size=5, at=0.9)
    return site.work()


def streamed() -> RecordedWork:
    """A model of four parts, each of which leaves after its use, beside a component."""
    site = Site(12)
    parts = [f"dit/{i}" for i in range(4)]
    site.thread(*parts, uses=16, hold_s=0.2, size=2, family="dit")
    site.thread("vae", uses=2, hold_s=0.5, gap_s=3.0, size=2, at=0.5)
    return site.work()


def costs(work: RecordedWork, settings: list[Setting]) -> Callable[[Point], ReplayCost]:
    chunks = work.start.chunks
    return cache(lambda point: cost_of(run_at(work, settings, point, chunks, RATE), RATE))


@pytest.mark.parametrize(
    ("of", "rules"),
    [
        (cycle, ("eviction", "overtake")),
        (rivals, ("overtake", "residency_factor", "residency_bound_s")),
        (crowd, ("eviction", "overtake")),
        (streamed, ("eviction",)),
    ],
)
def test_the_search_finds_what_trying_all_settings_finds(
    of: Callable[[], RecordedWork], rules: tuple[str, ...]
) -> None:
    work = of()
    settings = [one for one in settings_of(work) if one.kind != "rule" or one.name in rules]
    cost = costs(work, settings)
    best = min(map(cost, product(*(one.values for one in settings))))
    found = cost(search.search(settings, cost, lambda: True))
    assert found.unserved == best.unserved
    assert found.seconds <= best.seconds * (1 + WORTH)
    assert found <= cost(tuple(None for _ in settings))


def test_without_time_the_settings_stay_as_recorded() -> None:
    settings, tried = settings_of(cycle()), list[Point]()

    def cost(point: Point) -> ReplayCost:
        tried.append(point)
        return ReplayCost(0, 1.0)

    nothing = tuple(None for _ in settings)
    assert search.search(settings, cost, lambda: False) == nothing
    assert set(tried) == {nothing}


def test_settings_without_effect_stay_as_recorded() -> None:
    work = cycle()
    settings = settings_of(work)
    found = search.search(settings, costs(work, settings), lambda: True)
    assert search.changes(settings, found) == {("rule", "eviction"): "next_use"}


def test_a_pin_holds_from_the_first_load_and_a_recorded_one_can_be_left_out() -> None:
    work = cycle()
    pin = [Setting("pin", "a", (None, True))]
    pinned = run_at(work, pin, (True,), 8, RATE)
    assert pinned.refused == 0
    assert sum(1 for one in pinned.uses if "a" in one) == 6
    assert pinned.loads == 1 + 12
    site = Site(8)
    site.thread("a", "b", "c", uses=18, hold_s=1.0)
    site.machine.at(0.5, lambda: site.ask(1, protocol.Pin(99, "a")))
    recorded = site.work()
    assert recorded.happened.loads == 13
    (setting,) = (one for one in settings_of(recorded) if one.kind == "pin" and one.name == "a")
    assert False in setting.values
    assert run_at(recorded, [setting], (False,), 8, RATE).loads == 18


def test_a_pin_that_was_refused_is_none_to_leave_out() -> None:
    site = Site(8)
    site.thread("a", "b", "c", uses=18, hold_s=1.0)
    site.thread("whole", uses=1, hold_s=0.1, size=8, at=20.0)
    site.machine.at(21.0, lambda: site.ask(1, protocol.Pin(99, "a")))
    recorded = site.work()
    assert recorded.happened.refused == 1
    (setting,) = (one for one in settings_of(recorded) if one.kind == "pin" and one.name == "a")
    assert setting.values == (None, True)


def test_a_pin_that_is_refused_is_no_plan() -> None:
    work = rivals()
    pin = [Setting("pin", "a", (None, True))]
    assert run_at(work, pin, (True,), 8, RATE).refused
    assert search.search(pin, costs(work, pin), lambda: True) == (None,)


def test_a_family_keeps_as_much_as_the_plan_says() -> None:
    work = streamed()
    resize = [Setting("resize", "dit", (None, 0, 4, 8))]
    loads = [run_at(work, resize, (kept,), 12, RATE).loads for kept in (None, 0, 4, 8)]
    assert loads[0] == loads[1] > loads[2] > loads[3]
