"""The picture of `swapd top`, without a terminal: a status of a core and its last lines in, lines
out."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from swapd.cli.conclusions import report
from swapd.cli.last_lines import LogEntry
from swapd.cli.live import screen
from swapd.cli.live.screen import Choice, Snapshot
from swapd.cli.render import Phrase
from swapd.core import status
from swapd.shared.protocol import Status
from tests.core.world import World
from tests.samples import bare


def holding(nbytes: int, **sizes: int) -> tuple[World, int]:
    """A core of so many bytes, and a session that has registered components of these sizes."""
    w = World(nbytes)
    s = w.open()
    for name, size in sizes.items():
        w.register(s, name, size)
    return w, s


def view(w: World, lines: Sequence[LogEntry] = (), amiss: str = "", **more: Any) -> Snapshot:
    """What a daemon with this core says now."""
    ledger = w.ledger
    told = msgspec.structs.replace(
        bare(Status),
        device="host",
        chunk_bytes=1,
        budget_bytes=ledger.pool.total,
        quarantined_bytes=0,
        waiting=len(w.core.ledger.queue),
        components=tuple(
            status.component_status(ledger, c, w.now) for c in ledger.components.values()
        ),
        sessions=tuple(status.session_status(ledger, s) for s in ledger.sessions),
        waits=status.waits(w.core, w.now),
        copies=status.copies(ledger, w.now),
        **more,
    )
    return Snapshot(report(told), lines, w.now, amiss)


def shown(w: World, choice: Choice | None = None, width: int = 80, height: int = 24) -> list[str]:
    found = screen.lines(view(w), choice or Choice(), width, height, w.now)
    return [line.plain.rstrip() for line in found]


def names(w: World, choice: Choice) -> list[str]:
    return [row.name for row in screen.listed(screen.all_rows(view(w), w.now), choice)]


@pytest.mark.parametrize("height", [1, 2, 3, 5, 6, 9, 14, 24, 50])
@pytest.mark.parametrize("width", [0, 1, 2, 10, 29, 44, 80, 200])
def test_it_is_as_large_as_the_terminal_whatever_that_is(width: int, height: int) -> None:
    w, s = holding(10)
    t = w.open()
    for name in ("a", "\U0001f525漢字" * 20, "e\u0301" * 50, "[bold]x[/bold]", *"bcdefgh"):
        w.register(s, name, 2)
    w.use(s, "a", "b", "c")
    w.acquire(t, "d", "e", "f")
    w.acquire(t, "g")
    now = view(w, amiss="the daemon is gone")
    found = screen.lines(now, Choice(only="e"), width, height, w.now)
    assert len(found) == height
    for line in found:
        assert line.cell_len <= width
        assert line.plain.isprintable()


def test_what_is_amiss_is_told_whole() -> None:
    amiss = "the daemon at /run/user/1000/swapd (process 4711) does not answer: " + "why " * 20
    told = view(World(10), amiss=amiss)
    found = [line.plain for line in screen.lines(told, Choice(), 80, 24, 0.0)]
    assert " ".join(" ".join(found[-4:-1]).split()) == amiss.strip()


def test_a_name_is_shown_as_it_is_and_nothing_of_it_is_obeyed() -> None:
    w = World(10)
    s = w.open()
    w.register(s, "a")
    components = tuple(
        msgspec.structs.replace(view(w).status.components[0], name=name, state="resident")
        for name in ("a\x1b[2Jb", "a\u202eb", "[red]x")
    )
    told = Snapshot(
        msgspec.structs.replace(view(w).status, components=components),
        [],
        0.0,
    )
    text = "\n".join(line.plain for line in screen.lines(told, Choice(), 80, 24, 0.0))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "a\\x1b[2Jb" in text
    assert "[red]x" in text


def test_the_bar_has_each_component_as_large_as_its_share() -> None:
    w, s = holding(10, talker=5, vae=3)
    w.touch(s, "talker")
    w.touch(s, "vae")
    drawn = screen.bar(screen.all_rows(view(w), w.now), 10, 40)
    assert drawn.plain == "talker".ljust(19) + "▏" + "vae".ljust(11) + "▏" + "·" * 8
    colours = {str(span.style) for span in drawn.spans}
    assert len(colours) == 3, "two components, and what is free"
    assert "8 B of 10 B (80%)" in shown(w)[0]


def test_the_table_says_who_holds_what() -> None:
    w, s = holding(10, talker=5, vae=3)
    w.use(s, "talker")
    text = shown(w)
    (talker,) = [line for line in text[2:] if line.startswith("talker ")]
    assert talker.split()[1:4] == ["5", "B", "leased"]
    assert talker.endswith("in use")
    assert w.ledger.sessions[s].label in talker
    (vae,) = [line for line in text if line.startswith("vae ")]
    assert "absent" in vae
    assert vae.endswith("never")


def test_the_parts_of_what_is_streamed_are_one_row() -> None:
    w, s = holding(10)
    for part in ("rest", "0", "1"):
        w.register(s, f"dit/{part}", 1, part_of="dit")
    w.touch(s, "dit/0")
    assert names(w, Choice()) == ["dit"]
    assert "1 of 3 in" in shown(w)[3]


def test_rows_are_sorted_and_filtered_as_was_chosen() -> None:
    w, s = holding(10)
    for name, nbytes in (("a", 1), ("b", 3), ("c", 2)):
        w.register(s, name, nbytes)
    w.touch(s, "b")
    w.sleep(5.0)
    w.touch(s, "c")
    choice = Choice()
    found = {}
    for _ in screen.SORTS:
        found[choice.sort] = names(w, choice)
        choice.sort_next()
    assert found == {
        "name": ["a", "b", "c"],
        "size": ["b", "c", "a"],
        "state": ["b", "c", "a"],
        "last use": ["c", "b", "a"],
    }
    assert choice.sort == "name"
    assert names(w, Choice(only="B")) == ["b"]


def test_the_selected_row_stays_selected_and_in_sight() -> None:
    w, s = holding(50)
    for i in range(40):
        w.register(s, f"c{i:02}")
    choice = Choice()
    rows = screen.listed(screen.all_rows(view(w), w.now), choice)
    choice.move(rows, 30)
    assert choice.selected == "c30"
    assert any(line.startswith("c30 ") for line in shown(w, choice))
    w.register(s, "a")
    assert any(line.startswith("c30 ") for line in shown(w, choice))
    choice.move(screen.listed(screen.all_rows(view(w), w.now), choice), -1000)
    assert choice.selected == "a"
    w.unregister(s, "a")
    shown(w, choice)
    assert choice.selected == "c00", "the first, now that it is gone"


def test_who_waits_is_listed_with_what_for() -> None:
    w, s = holding(10, a=6, b=6)
    t = w.open()
    w.use(s, "a")
    w.acquire(t, "b")
    w.sleep(3.0)
    text = shown(w, width=200)
    at = text.index("waiting")
    said = "b; not known yet: a is in use for the first time; needs 6 B, free 4 B; held: a (6 B) by"
    assert said in text[at + 1]
    assert text[at + 1].lstrip().startswith("3 s")
    assert "1 waiting" in text[0]


def test_of_many_that_wait_the_number_is_told() -> None:
    w, s = holding(10, a=6, b=6)
    w.use(s, "a")
    for _ in range(9):
        w.acquire(w.open(), "b")
    text = shown(w)
    assert text[text.index("waiting") + 4] == "6 more"


def test_a_copy_has_its_progress_by_the_speed_of_the_last() -> None:
    w, s = holding(20, a=4, b=8, c=4)
    w.acquire(s, "a")
    assert "under way" in "\n".join(shown(w)), "nobody knows how fast it is"
    w.now += 2.0
    w.settle()
    w.acquire(s, "b")
    w.acquire(s, "c")
    w.now += 1.0
    text = "\n".join(shown(w))
    assert "in  b  8 B  ###--------- ~25%  2 B/s" in text
    assert "in  c  4 B  next" in text


def test_what_is_pinned_is_said() -> None:
    w = World(10)
    s = w.open()
    w.register(s, "a")
    w.pin(s, "a")
    assert "pinned" in shown(w)[3]
    w.pin(s, "a", False)
    assert "pinned" not in shown(w)[3]


def test_columns_give_way_where_there_is_no_room_and_the_name_stays() -> None:
    w, _ = holding(10, talker=5)
    heads = {width: shown(w, width=width)[2].split() for width in (20, 30, 60, 80, 120)}
    assert heads[20] == ["name*"]
    assert heads[30] == ["name*", "size", "state"]
    assert "holders" not in heads[60]
    assert "holders" in heads[80]
    assert "in/out" in heads[120]
    for width in heads:
        assert cell_len(shown(w, width=width)[3]) <= width
        assert shown(w, width=width)[3].startswith("talker")


def test_the_last_records_are_below() -> None:
    w = World(10)
    said = Phrase("evict", "a", "to make room for b", swap=True)
    told = view(w, [LogEntry(at, 0.0, said) for at in range(100)])
    text = [line.plain.rstrip() for line in screen.lines(told, Choice(), 80, 24, w.now)]
    assert text.count(text[text.index("log") + 1]) > 10
    assert "evict      a  to make room for b" in text[-2]


def test_ages_grow_between_two_statuses() -> None:
    w, s = holding(10, a=6, b=6, c=1)
    t = w.open()
    w.touch(s, "c")
    w.use(s, "a")
    w.acquire(t, "b")
    told = view(w)
    text = "\n".join(line.plain for line in screen.lines(told, Choice(), 120, 24, w.now + 42.0))
    assert "  42 s  " in text
    assert "42 s" in next(line for line in text.splitlines() if line.startswith("c "))
