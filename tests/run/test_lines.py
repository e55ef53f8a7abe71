"""Output of stages is shown in whole lines, even if it is not text."""

import os
import selectors
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from swapd.run.output import LINE_MAX_BYTES, UNENDED_S, Lines, Output, Pipe, on_terminal


def test_what_does_not_end_is_shown_after_a_while() -> None:
    lines = Lines()
    assert lines.feed(b"x\nno end", 5.0) == [b"x"]
    assert lines.feed(b"...", 5.5) == []
    assert lines.due == 5.0 + UNENDED_S
    assert lines.unended() == [b"no end..."]
    assert lines.due is None
    assert lines.unended() == []


def test_a_line_without_an_end_is_never_kept_whole() -> None:
    lines = Lines()
    shown = []
    for _ in range(100):
        shown += lines.feed("ä".encode() * 4000, 0.0)
        assert len(lines._rest) <= LINE_MAX_BYTES
    assert b"".join([*shown, *lines.unended()]).decode() == "ä" * 400_000
    assert all(len(one) <= LINE_MAX_BYTES and one.decode() for one in shown)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain \xc3\xa4\ttab", b"plain \xc3\xa4\ttab"),
        (b"10%\r20%\r30%\r", b"30%"),
        (b"line\r", b"line"),
        (b"\x1b[31mred", b"\x1b[31mred\x1b[0m"),
        (b"\x1b[2J\x1b[1;1Hgone", rb"\x1b[2J\x1b[1;1Hgone"),
        (b"\x1b]0;title\x07", rb"\x1b]0;title\x07"),
        (b"\xff\x00\xfe", rb"\xff\x00\xfe"),
        ("\u202eturned".encode(), rb"\u202eturned"),
    ],
)
def test_nothing_but_colours_reaches_a_terminal(line: bytes, shown: bytes) -> None:
    assert on_terminal(line) == shown


# --- on one stream -------------------------------------------------------------------------


class Shown:
    """An output, and the reading end of its stream."""

    def __init__(self, *names: str, terminal: bool = False) -> None:
        self.reader, self._writer = os.pipe()
        self.output = Output(names, self._writer, self._writer, terminal=terminal)

    def until(self, end: bytes) -> bytes:
        """The bytes shown up to and with `end`."""
        found = b""
        while not found.endswith(end):
            found += (data := os.read(self.reader, 1 << 16))
            assert data, found
        return found

    def rest(self) -> bytes:
        """The remaining bytes, which must fit in a pipe; the output is closed."""
        self.end()
        found = b""
        while data := os.read(self.reader, 1 << 16):
            found += data
        return found

    def end(self) -> None:
        """Close the output; returns when everything is written."""
        self.output.close()
        os.close(self._writer)
        self._writer = -1

    def close(self) -> None:
        os.close(self.reader)
        if self._writer >= 0:
            os.close(self._writer)


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown("a", "bc")
    yield made
    made.close()


def test_each_line_has_the_name_of_its_stage_and_none_is_torn(shown: Shown) -> None:
    a, bc = shown.output.begins("a"), shown.output.begins("bc")
    os.write(a.theirs, b"one ")
    os.write(bc.theirs, b"two\nthree\n")
    assert shown.until(b"three\n") == b"bc | two\nbc | three\n"
    os.write(a.theirs, b"and a half\n")
    assert shown.until(b"half\n") == b"a  | one and a half\n"
    os.write(a.theirs, b"last words")
    os.close(a.theirs)
    shown.output.ends(a)
    shown.output.say("a ended")
    os.close(bc.theirs)
    assert shown.rest() == b"a  | last words\nswapd: a ended\n"


def test_a_stage_s_last_words_precede_those_of_stages_that_end_with_it(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, bc = shown.output.begins("a"), shown.output.begins("bc")
    select = selectors.DefaultSelector.select
    ended: list[Pipe] = []

    def late(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        found = select(selector, timeout)
        if not ended and any(key.data is bc for key, _ in found):
            ended.append(a)
            shown.output.ends(a)  # before the words of `bc` are read
        return found

    monkeypatch.setattr(selectors.DefaultSelector, "select", late)
    os.write(a.theirs, b"used\n")
    shown.until(b"used\n")
    os.write(a.theirs, b"last words")
    os.write(bc.theirs, b"told to end\n")
    assert shown.until(b"told to end\n") == b"a  | last words\nbc | told to end\n"
    os.close(a.theirs)
    os.close(bc.theirs)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("meanwhile", ["_wait_s", "_read", "_show_unended"])
def test_what_swapd_says_of_a_stage_follows_its_words_from_before(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, meanwhile: str, ends: bool
) -> None:
    a, bc = shown.output.begins("a"), shown.output.begins("bc")
    for pipe in (a, bc):
        os.write(pipe.theirs, b"used\n")
        shown.until(b"used\n")
    step = getattr(Output, meanwhile)
    told: list[Pipe] = []

    def during(output: Output, *args: Any) -> Any:
        if output is shown.output and not told:
            told.append(a)
            os.write(a.theirs, b"last words\n")
            if ends:
                output.ends(a)
            output.say("a ended")
        return step(output, *args)

    monkeypatch.setattr(Output, meanwhile, during)
    os.write(bc.theirs, b"wakes it\n")
    seen = shown.until(b"ended\n").replace(b"bc | wakes it\n", b"")
    os.close(a.theirs)
    os.close(bc.theirs)
    assert seen + shown.rest() == b"a  | last words\nswapd: a ended\n"


def test_a_flood_of_one_stage_lets_the_others_be_heard_and_is_never_kept(shown: Shown) -> None:
    flood, bc = shown.output.begins("a"), shown.output.begins("bc")
    heard = threading.Event()

    def write() -> None:
        with suppress(BrokenPipeError):
            while True:
                os.write(flood.theirs, b"x" * 4095 + b"\n")

    def read() -> None:
        seen = b""
        while data := os.read(shown.reader, 1 << 16):
            seen = seen[-20:] + data
            if b"bc | here\n" in seen:
                heard.set()

    threads = [threading.Thread(target=one) for one in (write, read)]
    for thread in threads:
        thread.start()
    os.write(bc.theirs, b"here\n")
    assert heard.wait(60)
    shown.output.ends(flood)  # while other processes still write to it
    threads[0].join()
    os.close(flood.theirs)
    os.close(bc.theirs)
    shown.end()
    threads[1].join()


def test_what_a_full_disk_does_not_take_is_said_once_and_writing_goes_on() -> None:
    said, err = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    output = Output(["a"], full, err)
    a = output.begins("a")
    os.write(a.theirs, b"x\n")
    assert os.read(said, 4096) == (
        b"swapd: the output of stages cannot be shown: No space left on device\n"
    )
    os.write(a.theirs, b"y\n")
    reader, room = os.pipe()
    os.dup2(room, full)
    os.write(a.theirs, b"z\n")
    assert os.read(said, 4096) == b"swapd: the output of stages is shown again\n"
    shown = b""
    while not shown.endswith(b"a | z\n"):  # "y" may have found room, too
        shown += os.read(reader, 4096)
    os.close(a.theirs)
    output.close()
    for fd in (full, said, err, reader, room):
        os.close(fd)


def test_what_is_no_text_is_written_as_it_is_where_no_terminal_is(shown: Shown) -> None:
    a = shown.output.begins("a")
    os.write(a.theirs, bytes(range(256)))
    os.close(a.theirs)
    data = bytes(range(256)).replace(b"\n", b"\na  | ")
    assert shown.until(b"\xff\n") == b"a  | " + data + b"\n"
