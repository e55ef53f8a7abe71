"""What a record of the swap log means after the earlier ones, and what is forgotten."""

from swapd.core import Rules, actions, events
from swapd.log.history import LABELS_MAX, NAMES_GONE_MAX, RecordContext, names_in
from swapd.log.reader import Reader
from swapd.log.records import Record, Start, render
from swapd.shared.protocol import Acquire, AcquireWorkspace, Register, Release, UsedRanges

START = Record(1, 0, 1.0, start=Start("9.9", "host", 8, 2 << 20, Rules()))


def test_numbers_become_names() -> None:
    seen = RecordContext()
    order = actions.CopyIn(1, "dit", 7, 100, ((0, 1),))
    seen.note(Record(2, 0, 1.0, action=order))
    done = Record(3, 2, 1.5, event=events.CopiedIn(1.5, 7))
    assert seen.about(done) == ("dit",)
    seen.note(done)
    assert seen.about(done) == ()


def test_an_eviction_is_about_whom_it_makes_room_for_too() -> None:
    seen = RecordContext()
    seen.note(Record(2, 0, 1.0, event=events.SessionRequest(1.0, 3, Acquire(8, ("dit",)))))
    evict = Record(3, 2, 1.0, action=actions.Evict("vae", 1, "room", (3, 8)))
    assert seen.about(evict) == ("vae", "dit")


def test_a_session_takes_what_it_registered_with_it() -> None:
    seen = RecordContext()
    seen.note(Record(2, 0, 1.0, action=actions.MakeHostCopy(3, 1, "vae", 5, False)))
    seen.note(Record(3, 0, 1.0, action=actions.MakeHostCopy(3, 2, "dit", 5, False)))
    seen.note(Record(4, 0, 1.0, action=actions.DropHostCopy(1, "vae")))
    assert seen.about(Record(5, 0, 1.0, event=events.SessionGone(1.0, 3))) == ("dit",)


def test_nothing_is_remembered_of_what_is_over() -> None:
    seen = RecordContext()
    for i in range(LABELS_MAX + 5):
        seen.note(Record(i, 0, 1.0, event=events.SessionOpened(1.0, i, "w")))
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, i, Acquire(1, ("a",)))))
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, i, Acquire(2, ("a",)))))
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, i, Release(4, 2))))
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, i, AcquireWorkspace(3, 9))))
        seen.note(Record(i, 0, 1.0, action=actions.Lend(i, f"workspace {i}.3", i, ((0, 9),))))
        seen.note(Record(i, 0, 1.0, event=events.Lent(1.0, i)))
        seen.note(Record(i, 0, 1.0, action=actions.Reclaim(f"workspace {i}.3", i, ((0, 9),))))
        seen.note(Record(i, 0, 1.0, event=events.Reclaimed(1.0, i)))
        seen.note(Record(i, 0, 1.0, action=actions.Evict("a", i, "room")))
        seen.note(Record(i, 0, 1.0, action=actions.Evicted("a", i, 1, 0)))
        seen.note(Record(i, 0, 1.0, event=events.SessionGone(1.0, i)))
    assert len(seen.labels) == LABELS_MAX
    assert (seen.asked, seen.evictions, seen.owned, seen.copies) == ({}, {}, {}, {})


def test_names_that_are_gone_or_were_refused_are_forgotten_and_no_others() -> None:
    seen = RecordContext()

    def register(i: int, name: str) -> None:
        asked = Register(i, name, 5, part_of="family", scratch="saved")
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, 3, asked)))
        seen.note(Record(i, 0, 1.0, action=actions.MakeHostCopy(3, i, name, 5, False)))
        seen.note(Record(i, 0, 1.0, action=actions.Accept(3, i)))
        used = (UsedRanges(name, 1, ((0, 4),)),)
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, 3, Release(i, 2, used=used))))

    register(1, "stays")
    for i in range(2, 3 * NAMES_GONE_MAX):
        register(i, f"gone {i}")
        seen.note(Record(i, 0, 1.0, action=actions.DropHostCopy(i, f"gone {i}")))
    for i in range(3 * NAMES_GONE_MAX, 5 * NAMES_GONE_MAX):
        refused = Register(i, f"refused {i}", 5)
        seen.note(Record(i, 0, 1.0, event=events.SessionRequest(1.0, 3, refused)))
        seen.note(Record(i, 0, 1.0, action=actions.Refuse(3, i, "too_large", "no room")))
    for known in (seen.sizes, seen.scratch, seen.used, seen.part_of):
        assert "stays" in known
        assert len(known) <= NAMES_GONE_MAX + 3
    assert f"refused {5 * NAMES_GONE_MAX - 1}" in seen.sizes, (
        "the last are not looked for each time"
    )


def test_a_workspace_is_known_by_its_request() -> None:
    asked = Record(2, 0, 1.0, event=events.SessionRequest(1.0, 3, AcquireWorkspace(17, 9)))
    seen = RecordContext()
    seen.note(asked)
    lend = actions.Lend(3, "workspace 3.17", 5, ((0, 9),))
    seen.note(Record(3, 2, 1.0, action=lend))
    lent = Record(4, 3, 1.0, event=events.Lent(1.0, 5))
    granted = Record(5, 4, 1.0, action=actions.Grant(3, 17, (), 0.5, False))
    for record in (asked, lent, granted):
        assert seen.about(record) == (lend.name,)


def test_names_in_a_log() -> None:
    asked = Record(2, 0, 1.0, event=events.SessionRequest(1.0, 1, Acquire(1, ("a", "b"))))
    assert names_in(Reader().read([render(START), render(asked)])) == {"a", "b"}
