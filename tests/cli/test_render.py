"""The line that people read for each kind of record of the swap log."""

import time
from typing import Any, get_args

import msgspec
import pytest

from swapd.cli.common import day
from swapd.cli.render import line, say, sentence
from swapd.core import Rules, actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.history import RecordContext
from swapd.log.records import Record, Start
from swapd.shared.protocol import (
    Acquire,
    AcquireStart,
    AcquireWorkspace,
    AnyOrder,
    Register,
    Release,
    Scratch,
    UsedRanges,
)
from tests.samples import sample

MIB = 1 << 20
NOON = 1_700_000_000.25


@pytest.fixture
def seen() -> RecordContext:
    """Two workers with a component each; session 2 has acquired its own."""
    seen = RecordContext()
    said: list[AnyEvent | AnyAction] = [
        events.SessionOpened(0.0, 1, "thinker-worker"),
        events.SessionOpened(0.0, 2, "talker-worker"),
        events.SessionRequest(0.0, 1, Register(1, "thinker", 24 * MIB)),
        actions.MakeHostCopy(1, 1, "thinker", 24 * MIB, False),
        events.SessionRequest(0.0, 2, Register(1, "talker", 20 * MIB)),
        actions.MakeHostCopy(2, 2, "talker", 20 * MIB, False),
        events.SessionRequest(0.0, 2, Acquire(5, ("talker",))),
    ]
    for seq, item in enumerate(said, 2):
        seen.note(_record(item, seq=seq))
    return seen


def _record(item: AnyEvent | AnyAction, *, seq: int = 9, cause: int = 1, at: float = 0.0) -> Record:
    time = NOON + at
    if isinstance(item, events.Event):
        return Record(seq, cause, time, event=item)
    return Record(seq, cause, time, action=item)


def _text(
    item: AnyEvent | AnyAction, seen: RecordContext, *, everything: bool = False, **where: Any
) -> str | None:
    """The line without its time."""
    shown = line(_record(item, **where), seen, everything=everything)
    return None if shown is None else " ".join(shown.text.plain.split()[1:])


TALKER = "talker-worker (session 2)"
PINNED = events.HostCopiesPinned(1.0, 80 << 30, 120 << 30, 20.0)
LINES: list[tuple[list[AnyEvent | AnyAction], AnyEvent | AnyAction, str]] = [
    (
        [actions.CopyOut(2, "talker", 3, 20 * MIB, ((0, 10),))],
        events.CopiedOut(0.0, 3),
        "out talker 20 MiB 100 ms 210 MB/s written back",
    ),
    ([], actions.Evict("thinker", 1, "room"), "evict thinker 24 MiB to make room for a prefetch"),
    (
        [],
        actions.Evict("thinker", 1, "room", (2, 5)),
        f"evict thinker 24 MiB to make room for talker, asked by {TALKER}",
    ),
    (
        [],
        actions.Evict("thinker", 1, "sequential"),
        "evict thinker 24 MiB released, and sequential",
    ),
    ([], actions.Evict("thinker", 1, "alternating"), "evict thinker 24 MiB excluded by its group"),
    ([], actions.Evict("thinker", 1, "unregister"), "evict thinker 24 MiB unregistered"),
    ([], actions.Evict("thinker", 1, "failed"), "evict thinker 24 MiB its load failed"),
    (
        [],
        actions.Waiting(2, 5, ("talker",), "needs 20 MiB"),
        f"waiting talker {TALKER} needs 20 MiB",
    ),
    (
        [],
        actions.Refuse(2, 5, "timeout", "not granted"),
        f"refused talker {TALKER}, timeout: not granted",
    ),
    (
        [],
        actions.Refuse(2, 5, "timeout", "not granted", tried=True),
        f"skipped talker {TALKER}, timeout: not granted",
    ),
    (
        [],
        actions.SendBroken(2, "talker", 3, "no bus"),
        f"broken talker {TALKER} holds it no longer: no bus",
    ),
    ([], events.SessionOpened(0.0, 4, "vllm-0"), "opened vllm-0 (session 4)"),
    ([], events.SessionGone(0.0, 1), "gone thinker-worker (session 1) and with it thinker"),
    ([], PINNED, "pinned host copies 80 GiB of 120 GiB, after 20 s"),
    (
        [],
        msgspec.structs.replace(PINNED, refused="the limit of 80 GiB is reached"),
        "pinned host copies 80 GiB of 120 GiB, after 20 s; the rest is not: the limit of 80 GiB is "
        "reached",
    ),
]


@pytest.mark.parametrize(("before", "item", "said"), LINES, ids=[said for _, _, said in LINES])
def test_a_record_has_its_line(
    seen: RecordContext, before: list[AnyEvent | AnyAction], item: AnyEvent | AnyAction, said: str
) -> None:
    for each in before:
        seen.note(_record(each))
    assert _text(item, seen, everything=True, at=0.1) == said
    tried = isinstance(item, actions.Refuse) and item.tried
    assert (_text(item, seen) is None) == tried, "what was only tried is no refusal"


GIB = 1 << 30
QUARTER = ((0, GIB // 2), (GIB, GIB // 2))


def _scratch(seen: RecordContext, kind: Scratch) -> Record:
    asked = Register(2, "kv", 4 * GIB, mutable=True, scratch=kind)
    record = _record(events.SessionRequest(0.0, 1, asked))
    seen.note(record)
    return record


@pytest.mark.parametrize("kind", ["dropped", "saved"])
def test_scratch_is_registered_with_what_becomes_of_it(seen: RecordContext, kind: Scratch) -> None:
    said = say(_scratch(seen, kind), seen).detail
    assert said == f"4 GiB, lru, scratch, {kind} when it is evicted; by thinker-worker (session 1)"


def test_a_host_copy_that_takes_no_memory_says_so(seen: RecordContext) -> None:
    made = actions.MakeHostCopy(1, 3, "kv", 4 * GIB, True, empty=True)
    assert say(_record(made), seen).detail == "a host copy of 4 GiB, which takes no memory"


def test_a_release_says_what_is_used_of_scratch(seen: RecordContext) -> None:
    used = (UsedRanges("kv", 1, QUARTER), UsedRanges("kv2", 1, ()))
    said = say(_record(events.SessionRequest(0.0, 2, Release(6, 5, used=used))), seen).detail
    assert said == "by talker-worker (session 2); of kv 1 GiB is used; of kv2 0 B is used"


def test_leaving_has_a_line_of_its_own_only_if_it_took_an_answer(seen: RecordContext) -> None:
    evicted = actions.Evicted("thinker", 1, 24 * MIB, 0)
    seen.note(_record(actions.Evict("thinker", 1, "room", (2, 5)), cause=8))
    assert _text(evicted, seen, cause=8) is None
    said = _text(evicted, seen, cause=11, at=0.002)
    assert said is not None
    assert said.startswith("evicted thinker 24 MiB left after 2")
    assert _text(actions.Evicted("thinker", 1, 24 * MIB, 24 * MIB), seen, cause=11) is None


def test_a_grant_is_shown_if_it_waited_and_a_hit_only_with_all(seen: RecordContext) -> None:
    waited = actions.Grant(2, 5, (), 0.0691, True)
    said = "granted talker to talker-worker (session 2) after 69.1 ms"
    assert _text(waited, seen) == said
    overtaken = actions.Grant(2, 5, (), 0.0691, True, overtaken=3)
    assert _text(overtaken, seen) == f"{said}, overtaken by 3"
    hit = _record(actions.Grant(2, 5, (), 0.0, False))
    assert line(hit, seen) is None
    shown = line(hit, seen, everything=True)
    assert shown is not None
    assert "hit" in shown.text.plain


def test_a_workspace_is_asked_for_lent_and_taken_back(seen: RecordContext) -> None:
    asked = _record(events.SessionRequest(0.0, 2, AcquireWorkspace(6, 6 * MIB, timeout_s=1.0)))
    assert say(asked, seen).detail == "6 MiB for talker-worker (session 2) (within 1 s)"
    seen.note(asked)
    name = "workspace 2.6"
    assert say(_record(actions.Grant(2, 6, (), 0.5, False)), seen).subject == name
    seen.note(_record(actions.Lend(2, name, 3, ((0, 3),))))
    assert _text(events.Lent(0.0, 3), seen, at=0.01) == f"lent {name} the driver has it after 10 ms"
    seen.note(_record(events.Lent(0.0, 3)))
    assert _text(events.Lent(0.0, 3), seen) == "lent the driver has it"
    seen.note(_record(actions.Reclaim(name, 3, ((0, 3),))))
    assert _text(events.Reclaimed(0.0, 3), seen, at=2.0) == f"back {name} in the arena after 2 s"


def test_a_turn_to_start_is_asked_for_and_waited_for(seen: RecordContext) -> None:
    asked = _record(events.SessionRequest(0.0, 2, AcquireStart(6, 60.0)))
    assert say(asked, seen).subject == "the turn to start"
    assert say(asked, seen).detail == "for talker-worker (session 2) (within 60 s)"
    seen.note(asked)
    waits = actions.Waiting(2, 6, ("the turn to start",), "thinker-worker (session 1) starts")
    assert _text(waits, seen) == (
        "waiting the turn to start talker-worker (session 2) thinker-worker (session 1) starts"
    )
    assert say(_record(actions.Grant(2, 6, (), 4.0, False)), seen).subject == "the turn to start"


def test_the_terms_of_an_acquire_are_said(seen: RecordContext) -> None:
    asked = events.SessionRequest(1.0, 2, Acquire(5, ("talker",), 1, 1.0, 3, True, True))
    said = say(_record(asked), seen).detail
    assert said.endswith("(session 2) (priority 3, within 1 s, waits for the name, early)")


def test_sessions_of_the_command_line_are_left_out(seen: RecordContext) -> None:
    opened = _record(events.SessionOpened(0.0, 4, "swapd status"))
    assert line(opened, seen) is None
    seen.note(opened)
    assert line(_record(events.SessionGone(0.0, 4)), seen) is None


def test_the_start_says_the_device(seen: RecordContext) -> None:
    start = Start("9.9", "host", 20, 2 * MIB, Rules())
    shown = line(Record(1, 0, NOON, start=start), seen)
    assert shown is not None
    assert "swapd 9.9 on host: 20 chunks of 2 MiB" in shown.text.plain


def test_every_line_has_its_time_and_its_day_with_the_zone(
    seen: RecordContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        shown = line(_record(events.Stopping(0.0)), seen)
        assert shown is not None
        assert shown.text.plain.split()[0] == "03:43:20.250"
        assert day(shown.time) == "2023-11-15 UTC+05:30"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_missing_records_are_counted(seen: RecordContext) -> None:
    shown = line(Record(7, 0, NOON, dropped=12), seen)
    assert shown is not None
    assert "12 records: the disk was full, or" in shown.text.plain


def test_columns_line_up(seen: RecordContext) -> None:
    seen.note(_record(actions.CopyIn(2, "talker", 3, 20 * MIB, ((0, 10),))))
    one = line(_record(events.CopiedIn(0.0, 3), at=1.0), seen)
    two = line(_record(actions.Evict("thinker", 1, "room", (2, 5))), seen)
    assert one is not None
    assert two is not None
    assert one.text.plain.index("talker") == two.text.plain.index("thinker")
    assert one.text.plain.index("MiB") == two.text.plain.index("MiB")


def test_what_workers_say_cannot_reach_the_terminal(seen: RecordContext) -> None:
    seen.note(_record(events.SessionOpened(0.0, 7, "evil\x1b[2J\r\n")))
    shown = line(_record(actions.Waiting(7, 1, ("a",), "held by \x1b]0;x\a")), seen)
    assert shown is not None
    assert shown.text.plain.isprintable()


def test_a_log_that_lost_its_beginning_still_reads() -> None:
    seen = RecordContext()
    assert _text(events.CopiedIn(0.0, 3), seen) == "in"
    assert _text(actions.Grant(2, 5, (), 0.5, True), seen) == "granted to session 2 after 500 ms"
    said = _text(actions.Evict("vae", 3, "room", (2, 5)), seen)
    assert said == "evict vae to make room for request 5, asked by session 2"


_EXAMPLES: dict[Any, Any] = {
    float: 1.0,
    int: 1,
    str: "x",
    bool: True,
    tuple[str, ...]: ("x",),
    actions.Reason: "room",
    actions.Outcome: "in",
    actions.Urgency: (1, 0, 1),
}


KINDS = [kind for kind in get_args(AnyEvent | AnyAction) if kind is not events.SessionRequest]


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_has_words(kind: Any, seen: RecordContext) -> None:
    fields = msgspec.structs.fields(kind)
    given = {
        f.name: _EXAMPLES.get(f.type, () if "tuple" in str(f.type) else "timeout")
        for f in fields
        if f.required
    }
    assert_has_words(_record(kind(**given)), seen)


@pytest.mark.parametrize("kind", get_args(AnyOrder))
def test_every_request_has_words(kind: type[AnyOrder], seen: RecordContext) -> None:
    assert_has_words(_record(events.SessionRequest(1.0, 1, sample(kind))), seen)


def assert_has_words(record: Record, seen: RecordContext) -> None:
    assert say(record, seen).verb
    assert sentence(record, seen).plain.isprintable()
    shown = line(record, seen, everything=True)
    assert shown is not None
    assert shown.text.plain.isprintable()
