"""The picture made of a run's records equals the core's state at any time."""

import itertools

import pytest

from swapd.core import Residency, actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.policy import Rules
from swapd.core.records import Component
from swapd.core.states import State
from swapd.log.counts import NAMES_MAX, OTHERS, Counts, Histogram
from swapd.log.picture import Item, Picture
from swapd.log.records import Record
from swapd.shared import protocol
from tests.core import driver


def watched(chunks: int, chunk_bytes: int, rules: Rules) -> Residency:
    """A core with a picture made of its records; compares both after every event."""
    picture = Picture()  # no attribute of the core, whose state may keep no trace of a session
    seq = itertools.count(1)

    class Watched(Residency):
        def handle(self, event: AnyEvent) -> list[AnyAction]:
            done = super().handle(event)
            picture.note(Record(next(seq), 0, event.now, event=event))
            for action in done:
                picture.note(Record(next(seq), 0, event.now, action=action))
            compare(self, picture)
            return done

    return Watched(chunks, chunk_bytes, rules)


def compare(core: Residency, picture: Picture) -> None:
    ledger = core.ledger
    known = {name: c for name, c in ledger.components.items() if is_shown(c)}
    waited_for = {c.name for c in known.values() if c.uid in ledger.unordered}
    assert picture.items.keys() == known.keys() - waited_for
    for name, item in picture.items.items():
        c = known[name]
        assert item.inside == c.on_device, (item, c)
        assert item.leases == len(c.leases), (item, c)
        assert item.pinned == c.pinned
        assert (item.loads, item.evictions) == (c.loads, c.evictions)
        if item.kind != "workspace":
            assert item.state == c.state.value
    waits = {key for key, wait in picture.waits.items() if wait.names != (protocol.THE_START,)}
    assert waits == {w.key for w in core.admission.queue}
    counts = picture.counts
    assert (counts.bytes_in, counts.bytes_out) == (ledger.lane_in.nbytes, ledger.lane_out.nbytes)
    assert sum(tally.loads for tally in counts.of.values()) == ledger.loads
    assert sum(tally.evictions for tally in counts.of.values()) == ledger.evictions


def is_shown(c: Component) -> bool:
    return not c.workspace or c.state is not State.ABSENT


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_records_tell_what_the_core_knows(seed: int, strict: bool) -> None:
    driver.drive(watched, seed, steps=300, strict=strict)


def test_a_component_that_was_found_there_is_a_hit() -> None:
    picture = play(
        [
            *registered(1, "a"),
            *granted(2, "a", loads=1),
            *granted(3, "a"),
            events.Asked(9.0, 1, protocol.Release(4, 3, again=5)),
        ]
    )
    assert picture.items["a"].hits == 6
    assert picture.counts.of["a"].hits == 6
    assert picture.counts.of["a"].loads == 1


def test_what_was_only_tried_is_no_refusal() -> None:
    picture = play(
        [
            *registered(1, "a"),
            events.Asked(1.0, 1, protocol.Acquire(2, ("a",), timeout_s=0.0)),
            actions.Refuse(1, 2, "timeout", "somebody has it"),
            events.Asked(1.0, 1, protocol.Acquire(3, ("a",), timeout_s=1.0)),
            actions.Refuse(1, 3, "timeout", "somebody has it"),
        ]
    )
    assert picture.counts.of["a"].skips == 1
    assert picture.counts.of["a"].refusals == {"timeout": 1}
    assert not picture.waits


def test_names_that_come_and_go_leave_their_sums_and_nothing_else() -> None:
    counts = Counts()
    for at in range(10 * NAMES_MAX):
        counts.know(f"c{at}")
        counts.tally(f"c{at}").loads += 1
        if at % 2:
            counts.forget(f"c{at}")
    assert len(counts.of) <= NAMES_MAX + 1
    assert sum(tally.loads for tally in counts.of.values()) == 10 * NAMES_MAX
    for name in list(counts.of):
        counts.forget(name)
    assert counts.of.keys() == {OTHERS}


def test_a_name_that_nobody_registered_is_counted_among_the_others() -> None:
    picture = play(
        [
            events.Asked(1.0, 1, protocol.Acquire(1, ("nobody's",))),
            actions.Refuse(1, 1, "unknown_component", "no"),
        ]
    )
    assert picture.counts.of.keys() == {OTHERS}
    assert picture.counts.of[OTHERS].refusals == {"unknown_component": 1}


def test_parts_are_counted_as_what_they_are_parts_of() -> None:
    picture = Picture()
    for name in ("m/0", "m/1"):
        picture._add(Item(name, 1, 1, part_of="m"))
    assert picture.counts.of.keys() == {OTHERS, "m"}
    picture._remove("m/0")
    assert "m" in picture.counts.of
    picture._remove("m/1")
    assert "m" not in picture.counts.of


def test_a_time_is_counted_once_and_none_is_negative() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.5, 2.0, -1.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 1, 1]
    assert histogram.sum == pytest.approx(2.6)


def registered(request: int, name: str) -> list[AnyEvent | AnyAction]:
    return [
        events.Asked(1.0, 1, protocol.Register(request, name, 4)),
        actions.MakeHostCopy(1, 1, name, 4, False, request=request),
        events.HostCopySealed(1.0, 1),
    ]


def granted(request: int, name: str, *, loads: int = 0) -> list[AnyEvent | AnyAction]:
    copies: list[AnyEvent | AnyAction] = [
        actions.CopyIn(1, name, loads, 4, ((0, 4),)),
        events.CopiedIn(3.0, loads),
    ]
    return [
        events.Asked(2.0, 1, protocol.Acquire(request, (name,))),
        *(copies * loads),
        actions.Grant(1, request, (), 1.0 * loads, loads > 0),
    ]


def play(what: list[AnyEvent | AnyAction]) -> Picture:
    picture, now = Picture(), 0.0
    for seq, said in enumerate(what, 1):
        now = getattr(said, "now", now)
        is_event = isinstance(said, events.Event)
        picture.note(
            Record(seq, 0, now, event=said) if is_event else Record(seq, 0, now, action=said)  # type: ignore[arg-type]
        )
    return picture
