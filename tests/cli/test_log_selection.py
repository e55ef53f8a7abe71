"""`swapd log` selects and folds records of a log that a streaming worker wrote."""

import json
from pathlib import Path

import pytest

from swapd.cli.passes import Folding
from swapd.core import actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.history import Filter, RecordContext
from swapd.log.records import Record, render
from swapd.shared.protocol import Acquire, Register

from .conftest import swapd

MIB = 1 << 20
NOON = 1_700_000_000.0
BLOCKS = [f"dit/{i}" for i in range(6)]


class Told:
    """The records of a log, 10 ms apart."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.add(events.SessionOpened(0.0, 1, "painter"))
        self.add(events.SessionOpened(0.0, 2, "talker"))
        for uid, name in enumerate(BLOCKS, 10):
            register = Register(uid, name, 8 * MIB, part_of="dit", transient=True)
            self.add(events.SessionRequest(0.0, 1, register))
            self.add(actions.MakeHostCopy(1, uid, name, 8 * MIB, False))
        self.add(events.SessionRequest(0.0, 2, Register(1, "talker", 20 * MIB)))
        self.add(actions.MakeHostCopy(2, 2, "talker", 20 * MIB, False))
        self._generation = 0

    def add(self, item: AnyEvent | AnyAction) -> None:
        seq, time = len(self.records) + 1, NOON + len(self.records) * 0.01
        if isinstance(item, events.Event):
            self.records.append(Record(seq, 0, time, event=item))
        else:
            self.records.append(Record(seq, 0, time, action=item))

    def load(self, name: str, nbytes: int = 8 * MIB) -> None:
        self._generation += 1
        uid = BLOCKS.index(name) + 10 if name in BLOCKS else 2
        self.add(actions.CopyIn(uid, name, self._generation, nbytes, ((0, 4),)))
        self.add(events.CopiedIn(0.0, self._generation))

    def evict(self, name: str, reason: actions.Reason, waiter: tuple[int, int] | None) -> None:
        self.add(actions.Evict(name, self._generation, reason, waiter))
        self.add(actions.Evicted(name, self._generation, 8 * MIB, 0))

    def one_pass(self) -> None:
        for name in BLOCKS:
            self.load(name)
            self.evict(name, "sequential", None)

    def folded(self) -> list[str]:
        """The lines without their times, from the first block on."""
        folding, seen, shown = Folding(), RecordContext(), []
        for record in self.records:
            shown += list(folding.lines(record, seen))
            seen.note(record)
        shown += list(folding.flush(seen))
        words = [" ".join(each.text.plain.split()[1:]) for each in shown]
        return [text for text in words if not text.startswith(("opened", "register"))]

    def wanted(self, **only: object) -> list[Record]:
        chosen, seen, found = Filter(**only), RecordContext(), []  # type: ignore[arg-type]
        for record in self.records:
            if chosen.wants(record, seen):
                found.append(record)
            seen.note(record)
        return found


@pytest.fixture
def told() -> Told:
    return Told()


# --- folded ------------------------------------------------------------------------------


def test_a_pass_over_streamed_blocks_is_one_line(told: Told) -> None:
    for _ in range(3):
        told.one_pass()
    line = "stream dit 48 MiB 210 ms 240 MB/s 6 blocks in, 6 out"
    assert told.folded() == [line] * 3


def test_what_others_do_in_the_middle_of_a_pass_is_told_and_ends_it_not(told: Told) -> None:
    told.load("dit/0")
    told.evict("dit/0", "sequential", None)
    told.load("talker", 20 * MIB)
    for name in BLOCKS[1:]:
        told.load(name)
        told.evict(name, "sequential", None)
    first, second = told.folded()
    assert first.startswith("in talker 20 MiB")
    assert second.endswith("6 blocks in, 6 out")


def test_layers_that_leave_for_one_request_are_one_line_and_come_before_its_grant(
    told: Told,
) -> None:
    for name in BLOCKS:
        told.load(name)
    told.add(events.SessionRequest(0.0, 2, Acquire(7, ("talker",))))
    for name in BLOCKS[:4]:
        told.evict(name, "room", (2, 7))
    told.load("talker", 20 * MIB)
    told.add(actions.Grant(2, 7, (), 0.05, True))
    came, left, came_too, granted = told.folded()
    assert came == "in dit 48 MiB 110 ms 458 MB/s in 6 parts"
    assert left == (
        "evict dit 32 MiB in 4 parts, to make room for talker, asked by talker (session 2)"
    )
    assert came_too.startswith("in talker")
    assert granted.startswith("granted talker")


def test_one_part_alone_is_told_as_ever(told: Told) -> None:
    told.load("dit/0")
    told.load("dit/1")
    assert told.folded() == ["in dit/0 8 MiB 10 ms 839 MB/s", "in dit/1 8 MiB 10 ms 839 MB/s"]


# --- selected ----------------------------------------------------------------------------


def test_a_component_that_has_parts_is_all_of_them(told: Told) -> None:
    told.one_pass()
    told.load("talker")
    assert not {record.seq for record in told.wanted(components=("dit",))} & {
        record.seq for record in told.wanted(components=("talker",))
    }
    assert len(told.wanted(components=("dit",))) == len(told.wanted(components=("dit/*",)))


@pytest.mark.parametrize("who", ["2", "talker", "talk*"])
def test_a_session_is_its_label_or_number_and_what_was_done_for_it(told: Told, who: str) -> None:
    told.add(events.SessionRequest(0.0, 2, Acquire(7, ("talker",))))
    told.evict("dit/0", "room", (2, 7))
    found = told.wanted(sessions=(who,))
    assert [record.event or record.action for record in found][-1] == actions.Evict(
        "dit/0", 0, "room", (2, 7)
    )
    assert isinstance(found[0].event, events.SessionOpened)
    assert all(getattr(record.event, "session", 2) == 2 for record in found)


def test_only_what_took_so_long(told: Told) -> None:
    told.load("talker")
    told.add(actions.Grant(2, 7, (), 0.05, True))
    told.add(actions.Grant(2, 8, (), 0.0, False))
    assert len(told.wanted(min_s=0.005)) == 2
    assert [record.action for record in told.wanted(min_s=0.02)] == [
        actions.Grant(2, 7, (), 0.05, True)
    ]


def test_only_what_came_since(told: Told) -> None:
    told.one_pass()
    at = told.records[20].time
    assert told.wanted(since=at) == told.records[20:]


# --- by the command ----------------------------------------------------------------------


def test_the_command_selects_in_both_forms(tmp_path: Path, told: Told) -> None:
    told.one_pass()
    path = tmp_path / "log"
    path.write_bytes(b"".join(render(record) + b"\n" for record in told.records))
    of_file = ("--file", path)
    raw = swapd("log", "--json", *of_file, "-k", "copied_in", "-k", "register", "-c", "dit").stdout
    kinds = [json.loads(line)["kind"] for line in raw.splitlines()]
    assert kinds == ["register"] * 6 + ["copied_in"] * 6
    assert swapd("log", "--json", *of_file, "--since", "1m").stdout == ""
    assert len(
        swapd("log", "--json", *of_file, "--since", "2023-11-14").stdout.splitlines()
    ) == len(told.records)
    text = swapd("log", *of_file).stdout
    assert text.count(" stream ") == 1
    assert swapd("log", "--blocks", *of_file).stdout.count(" in  ") == 6


def test_what_cannot_be_selected_says_what_can(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "log"
    path.write_bytes(render(told.records[0]) + b"\n")
    nothing = swapd("log", "-c", "nope", "-c", "b*x", "--file", path, status=1)
    assert "no record is about nope or b*x" in nothing.stderr
    nothing = swapd("log", "-c", "dit*", "-k", "evict", "--file", path, status=1)
    assert "no record that the other options select is about dit*" in nothing.stderr
    nothing = swapd("log", "-s", "paniter", "-c", "dit*", "--file", path, status=1)
    assert "no record is about dit* and paniter" in nothing.stderr
    nothing = swapd("log", "-s", "paniter", "--file", path, status=1)
    assert "no record is about paniter" in nothing.stderr
    for words, says in (
        (("-k", "copied-in"), "did you mean copied_in"),
        (("--min-duration", "soon"), "write it like 50ms"),
        (("--since", "01:20"), "2h or 7d, or a date and time like '2026-11-23 01:20'"),
        (("dit", "-k", "evict"), "did you mean --component dit?"),
    ):
        said = swapd("log", *words, "--file", path, status=2).stderr
        assert says in " ".join(said.replace("│", " ").split())
