"""`swapd log NAME`: the records of one component, each under its cause."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, groupby

import msgspec
from rich.text import Text

from swapd.cli.common import clock, console, day, shown_json
from swapd.cli.last_lines import is_everyday
from swapd.cli.render import sentence
from swapd.core import actions, events
from swapd.log import history
from swapd.log.history import RecordContext, StoryStep
from swapd.log.reader import LogLine
from swapd.shared.protocol import NAMES_SHOWN
from swapd.shared.text import counted, plain
from swapd_client import UnknownComponent

_CLOCK_CELLS = len(clock(0.0))
#: From this number on, consecutive uses without a copy become one line.
_MANY = 3


def show(lines: Sequence[LogLine], name: str, *, everything: bool, json: bool) -> None:
    chapters = history.of_component(lines, name)
    if not chapters:
        raise UnknownComponent(_unknown(name, lines))
    if json:
        said = _said(lines, chapters)
        for step in chain.from_iterable(chapters):
            line = {
                "depth": step.depth,
                "about": step.about,
                "text": said[step.line.record.seq].plain,
                "record": msgspec.Raw(step.line.raw),
            }
            sys.stdout.buffer.write(shown_json(msgspec.json.encode(line)) + b"\n")
        sys.stdout.buffer.flush()
        return
    for text in story(lines, name, everything=everything):
        console.print(text, soft_wrap=True)


def story(lines: Sequence[LogLine], name: str, *, everything: bool = False) -> Iterator[Text]:
    """Yield what `show` prints; nothing if the log does not have the component."""
    if not (chapters := history.of_component(lines, name)):
        return
    said = _said(lines, chapters)
    yield _head(name, history.belonging(lines, name), chapters)
    width = len(str(chapters[-1][-1].line.record.seq)) + 1
    last = ""
    for told in chapters if everything else _folded(chapters):
        if isinstance(told, Text):
            yield Text.assemble(" " * (_CLOCK_CELLS + width + 4), told)
            continue
        for step in told:
            if (today := day(step.line.record.time)) != last:
                last = today
                yield Text(today, "bold")
            yield _line(step, said[step.line.record.seq], width)


def _unknown(name: str, lines: Sequence[LogLine]) -> str:
    names = history.names_in(lines)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        more = ", ..." * (len(names) > NAMES_SHOWN)
        shown = ", ".join(map(plain, sorted(names)[:NAMES_SHOWN]))
        hint = f"it has {shown or 'no component'}{more}"
    return f"the swap log does not have {name!r}; {hint}"


def _said(lines: Iterable[LogLine], chapters: list[list[StoryStep]]) -> dict[int, Text]:
    wanted = {step.line.record.seq for step in chain.from_iterable(chapters)}
    seen = RecordContext()
    said = {}
    for _, record in lines:
        if record.seq in wanted and not record.dropped:
            said[record.seq] = sentence(record, seen)
        seen.note(record)
    return said


def _head(name: str, names: set[str], chapters: list[list[StoryStep]]) -> Text:
    about = [step.line.record for step in chain.from_iterable(chapters) if step.about]
    loads = sum(isinstance(record.event, events.CopiedIn) for record in about)
    gone = sum(
        isinstance(record.action, actions.Evicted) and record.action.name in names
        for record in about
    )
    return Text.assemble(
        (plain(name), "bold"), f": {counted(len(about), 'record')}, in {loads}x, out {gone}x"
    )


def _line(step: StoryStep, said: Text, width: int) -> Text:
    record = step.line.record
    said = said.copy()
    if not step.about:
        said.stylize("dim")
    return Text.assemble(
        (clock(record.time), "dim"),
        "  ",
        (f"#{record.seq}".rjust(width), "dim"),
        "  ",
        ("   " * (step.depth - 1) + "└─ " if step.depth else "", "dim"),
        said,
    )


def _folded(chapters: list[list[StoryStep]]) -> Iterator[list[StoryStep] | Text]:
    for quiet, some in groupby(chapters, lambda c: all(is_everyday(s.line.record) for s in c)):
        told = list(some)
        uses = sum(isinstance(step.line.record.action, actions.Grant) for c in told for step in c)
        if uses < _MANY or not quiet:
            yield from told
            continue
        span = (
            f"from {clock(told[0][0].line.record.time)} to {clock(told[-1][-1].line.record.time)}"
        )
        yield Text(f"... {uses} uses without a copy, {span}", "dim")
