"""The picture of `swapd top`, without a terminal: records of a core in, lines out."""

import itertools
from typing import Any

import pytest
from rich.cells import cell_len

from swapd.cli.live import screen
from swapd.cli.live.screen import Choice
from swapd.cli.live.watch import Watch
from swapd.core import Residency, explain
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.policy import Rules
from swapd.log.picture import Item
from swapd.log.records import Record, Start
from swapd.shared.protocol import ComponentStatus, SessionStatus, StatusReply
from tests.core.world import World


def watched(chunks: int = 10, *, from_record: int = 1) -> tuple[World, Watch]:
    """A core, and the picture made of its records from that one on."""
    watch = Watch()
    seq = itertools.count(1)

    def note(**what: Any) -> None:
        record = Record(next(seq), 0, **what)
        if record.seq >= from_record:
            watch.note(record)

    class Watched(Residency):
        def handle(self, event: AnyEvent) -> list[AnyAction]:
            done = super().handle(event)
            note(time=event.now, event=event)
            for action in done:
                note(time=event.now, action=action)
            return done

    note(time=0.0, start=Start("0", "host", chunks, 1, Rules()))
    return World(chunks, core=Watched), watch


def shown(
    w: World, watch: Watch, choice: Choice | None = None, width: int = 80, height: int = 24
) -> list[str]:
    found = screen.lines(watch, choice or Choice(), width, height, w.now)
    return [line.plain.rstrip() for line in found]


def status(w: World, **more: Any) -> StatusReply:
    """The status of a daemon with this core."""
    components = tuple(
        ComponentStatus(
            **{field: getattr(c, field) for field in ("name", "session", "nbytes", "policy")},
            **{field: getattr(c, field) for field in ("group", "mutable", "loads", "pinned")},
            state=c.state.value,
            leases=len(c.leases),
            holders=explain.holders(w.ledger, c),
            idle_s=None,
            evictions=c.evictions,
            hits=c.hits,
            swap_in_s=None,
        )
        for c in w.ledger.components.values()
    )
    numbers = {field: 0 for field in StatusReply.__struct_fields__}
    texts = dict.fromkeys(("version", "device", "runtime_dir", "swap_log", "isolation"), "")
    empty = dict.fromkeys(("processes", "notes", "starting"), ())
    sizes = {"chunk_bytes": 1, "budget_bytes": w.ledger.pool.total}
    sessions = tuple(SessionStatus(s, f"worker {s}", 0, 0) for s in sorted(w.sessions))
    all_of_it = {**numbers, **texts, **empty, **sizes, **more}
    return StatusReply(**{**all_of_it, "components": components, "sessions": sessions})


def names(w: World, watch: Watch, choice: Choice) -> list[str]:
    return [row.name for row in screen.listed(screen.all_rows(watch, w.now), choice)]


@pytest.mark.parametrize("height", [1, 2, 3, 5, 6, 9, 14, 24, 50])
@pytest.mark.parametrize("width", [0, 1, 2, 10, 29, 44, 80, 200])
def test_it_is_as_large_as_the_terminal_whatever_that_is(width: int, height: int) -> None:
    w, watch = watched()
    s, t = w.open(), w.open()
    for name in ("a", "\U0001f525漢字" * 20, "e\u0301" * 50, "[bold]x[/bold]", *"bcdefgh"):
        w.register(s, name, 2)
    w.use(s, "a", "b", "c")
    w.acquire(t, "d", "e", "f")
    w.acquire(t, "g")
    found = screen.lines(watch, Choice(only="e"), width, height, w.now, "the daemon is gone")
    assert len(found) == height
    for line in found:
        assert line.cell_len <= width
        assert line.plain.isprintable()


def test_what_is_amiss_is_told_whole() -> None:
    _, watch = watched()
    amiss = "the daemon at /run/user/1000/swapd (process 4711) does not answer: " + "why " * 20
    found = [line.plain for line in screen.lines(watch, Choice(), 80, 24, 0.0, amiss)]
    assert " ".join(" ".join(found[-4:-1]).split()) == amiss.strip()


def test_a_name_is_shown_as_it_is_and_nothing_of_it_is_obeyed() -> None:
    _, watch = watched()
    for seq, name in ((2, "a\x1b[2Jb"), (3, "a\u202eb"), (4, "[red]x")):
        watch.picture.items[name] = Item(name, 1, seq)
    for item in watch.picture.items.values():
        item.state = "resident"
    text = "\n".join(line.plain for line in screen.lines(watch, Choice(), 80, 24, 0.0))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "a\\x1b[2Jb" in text
    assert "[red]x" in text


def test_the_bar_has_each_component_as_large_as_its_share() -> None:
    w, watch = watched(10)
    s = w.open()
    w.register(s, "talker", 5)
    w.register(s, "vae", 3)
    w.touch(s, "talker")
    w.touch(s, "vae")
    drawn = screen.bar(screen.all_rows(watch, w.now), 10, 40)
    assert drawn.plain == "talker".ljust(19) + "▏" + "vae".ljust(11) + "▏" + "·" * 8
    colours = {str(span.style) for span in drawn.spans}
    assert len(colours) == 3, "two components, and what is free"
    assert "8 B of 10 B (80%)" in shown(w, watch)[0]


def test_the_table_says_who_holds_what() -> None:
    w, watch = watched()
    s = w.open()
    w.register(s, "talker", 5)
    w.register(s, "vae", 3)
    w.use(s, "talker")
    text = shown(w, watch)
    (talker,) = [line for line in text[2:] if line.startswith("talker ")]
    assert talker.split()[1:4] == ["5", "B", "leased"]
    assert talker.endswith("in use")
    assert watch.picture.seen.labels[s] in talker
    (vae,) = [line for line in text if line.startswith("vae ")]
    assert "absent" in vae
    assert vae.endswith("never")


def test_the_parts_of_what_is_streamed_are_one_row() -> None:
    w, watch = watched()
    s = w.open()
    for part in ("rest", "0", "1"):
        w.register(s, f"dit/{part}", 1, part_of="dit")
    w.touch(s, "dit/0")
    assert names(w, watch, Choice()) == ["dit"]
    assert "1 of 3 in" in shown(w, watch)[3]


def test_rows_are_sorted_and_filtered_as_was_chosen() -> None:
    w, watch = watched(10)
    s = w.open()
    for name, nbytes in (("a", 1), ("b", 3), ("c", 2)):
        w.register(s, name, nbytes)
    w.touch(s, "b")
    w.sleep(5.0)
    w.touch(s, "c")
    choice = Choice()
    found = {}
    for _ in screen.SORTS:
        found[choice.sort] = names(w, watch, choice)
        choice.sort_next()
    assert found == {
        "name": ["a", "b", "c"],
        "size": ["b", "c", "a"],
        "state": ["b", "c", "a"],
        "last use": ["c", "b", "a"],
    }
    assert choice.sort == "name"
    assert names(w, watch, Choice(only="B")) == ["b"]


def test_the_selected_row_stays_selected_and_in_sight() -> None:
    w, watch = watched(50)
    s = w.open()
    for i in range(40):
        w.register(s, f"c{i:02}")
    choice = Choice()
    rows = screen.listed(screen.all_rows(watch, w.now), choice)
    choice.move(rows, 30)
    assert choice.selected == "c30"
    assert any(line.startswith("c30 ") for line in shown(w, watch, choice))
    w.register(s, "a")
    assert any(line.startswith("c30 ") for line in shown(w, watch, choice))
    choice.move(screen.listed(screen.all_rows(watch, w.now), choice), -1000)
    assert choice.selected == "a"
    w.unregister(s, "a")
    shown(w, watch, choice)
    assert choice.selected == "c00", "the first, now that it is gone"


def test_who_waits_is_listed_with_what_for() -> None:
    w, watch = watched(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.use(s, "a")
    w.acquire(t, "b")
    w.sleep(3.0)
    text = shown(w, watch, width=200)
    at = text.index("waiting")
    assert "b; needs 6 B, free 4 B; held: a (6 B) by" in text[at + 1]
    assert text[at + 1].lstrip().startswith("3 s")
    assert "1 waiting" in text[0]


def test_of_many_that_wait_the_number_is_told() -> None:
    w, watch = watched(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.use(s, "a")
    for _ in range(9):
        w.acquire(w.open(), "b")
    text = shown(w, watch)
    assert text[text.index("waiting") + 4] == "6 more"


def test_a_copy_has_its_progress_by_the_speed_of_the_last() -> None:
    w, watch = watched(20)
    s = w.open()
    w.register(s, "a", 4)
    w.register(s, "b", 8)
    w.register(s, "c", 4)
    w.acquire(s, "a")
    assert "under way" in "\n".join(shown(w, watch)), "nobody knows how fast it is"
    w.now += 2.0
    w.settle()
    w.acquire(s, "b")
    w.acquire(s, "c")
    w.now += 1.0
    first, second = watch.transfers()
    assert (first.name, first.bytes_per_s, first.done(w.now)) == ("b", 2.0, 0.25)
    assert second.since is None, "they are copied one after the other"
    text = "\n".join(shown(w, watch))
    assert "in  b  8 B  ###--------- ~25%  2 B/s" in text
    assert "in  c  4 B  next" in text


def test_what_is_pinned_is_said() -> None:
    w, watch = watched()
    s = w.open()
    w.register(s, "a")
    w.pin(s, "a")
    assert "pinned" in shown(w, watch)[3]
    w.pin(s, "a", False)
    assert "pinned" not in shown(w, watch)[3]


def test_the_last_records_are_those_that_people_read() -> None:
    w, watch = watched(4)
    s = w.open()
    w.register(s, "a", 3)
    w.register(s, "b", 3)
    w.touch(s, "a")
    for _ in range(1000):
        w.touch(s, "a")
    w.touch(s, "b")
    text = shown(w, watch)
    log = text[text.index("log") + 1 :]
    assert any("evict" in line and "to make room for b" in line for line in log)
    assert len(watch.said) < 20, "hits are not among them"


@pytest.mark.parametrize("late", [2, 30, 55])
def test_one_that_comes_late_is_told_the_rest(late: int) -> None:
    w, watch = watched(10, from_record=late)
    s = w.open()
    w.register(s, "a", 3)
    w.register(s, "b", 3)
    w.touch(s, "a")
    w.pin(s, "a")
    w.use(s, "b")
    w.touch(s, "a")
    watch.told(status(w, waiting=2), w.now, quiet=True)
    rows = {row.name: row for row in screen.all_rows(watch, w.now)}
    assert (rows["a"].state, rows["a"].policy) == ("idle", "pinned")
    assert rows["b"].state == "leased"
    assert "6 B of 10 B" in shown(w, watch)[0]
    assert watch.picture.seen.labels[s]
    assert "2 that began to wait before this view did" in "\n".join(shown(w, watch))


def test_what_the_daemon_says_of_a_holder_ends_with_the_lease() -> None:
    w, watch = watched()
    s = w.open()
    w.register(s, "a", 3)
    held = w.use(s, "a")
    watch.told(status(w), w.now, quiet=True)
    assert watch.picture.items["a"].holders == {w.ledger.sessions[s].label: 1}
    w.release(held)
    assert [row.state for row in screen.all_rows(watch, w.now)] == ["idle"]


def test_columns_give_way_where_there_is_no_room_and_the_name_stays() -> None:
    w, watch = watched()
    s = w.open()
    w.register(s, "talker", 5)
    heads = {width: shown(w, watch, width=width)[2].split() for width in (20, 30, 60, 80, 120)}
    assert heads[20] == ["name*"]
    assert heads[30] == ["name*", "size", "state"]
    assert "holders" not in heads[60]
    assert "holders" in heads[80]
    assert "in/out" in heads[120]
    for width in heads:
        assert cell_len(shown(w, watch, width=width)[3]) <= width
        assert shown(w, watch, width=width)[3].startswith("talker")
