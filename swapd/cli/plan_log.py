"""`swapd plan --from-log`: settings under which a recorded run would have waited less."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from swapd.cli import replay
from swapd.cli.common import console, print_json
from swapd.cli.plan_input import PUBLISHED
from swapd.log.replay import ReplayError
from swapd.plan import paste
from swapd.replay import RecordedWork, ReplayTally, search
from swapd.replay.search import Changes
from swapd.shared.text import plain_lines
from swapd.shared.units import seconds, size

_SEARCH_S = 60.0


class _Found(NamedTuple):
    changes: Changes
    outcome: ReplayTally
    tried: int


def plan_log(log: Path, budget: int | None, bandwidth: float | None, as_json: bool) -> None:
    """Print the best settings found for the last run in a log, and what they come to. Raises:
    ReplayError, OtherSchema, OSError."""
    began, work = time.monotonic(), replay.work_of(log)
    if not work.happened.waits:
        raise ReplayError(f"no acquire in the last run of {log} was granted: let its stages work")
    before, bytes_per_s = work.start.chunks, bandwidth or work.bytes_per_s or PUBLISHED
    chunks = replay.chunks_of(work, budget)
    again = search.run_at(work, [], (), before, bytes_per_s)
    found = _best(work, chunks, bytes_per_s)
    room = size(chunks * work.start.chunk_bytes)
    rows = [
        replay.row("what happened", work, work.happened, before),
        replay.row("as recorded", work, again, before),
        replay.row(f"best at {room}", work, found.outcome, chunks),
    ]
    said = [
        _saved(again, found.outcome),
        f"{found.tried} settings tried: {seconds(time.monotonic() - began)}",
    ]
    pasted = {"budget": room, **_pasted(work, chunks, found.changes)}
    if as_json:
        return print_json({"rows": rows, "best": pasted, "notes": said})
    texts = "\n".join([*said, *_block(pasted)])
    console.print(Group(replay.page(rows), "", Text(plain_lines(texts))))


def _best(work: RecordedWork, chunks: int, bytes_per_s: float) -> _Found:
    settings = search.settings_of(work)
    ends, tried = time.monotonic() + _SEARCH_S, 0

    def cost(point: search.Point) -> search.ReplayCost:
        nonlocal tried
        tried += 1
        outcome = search.run_at(work, settings, point, chunks, bytes_per_s)
        return search.cost_of(outcome, bytes_per_s)

    point = search.search(settings, cost, lambda: time.monotonic() < ends)
    outcome = search.run_at(work, settings, point, chunks, bytes_per_s)
    return _Found(search.changes(settings, point), outcome, tried)


# --- for people --------------------------------------------------------------------------


def _saved(before: ReplayTally, after: ReplayTally) -> str:
    if (more := after.refused + after.waiting - before.refused - before.waiting) > 0:
        return (
            f"{more} requests more than as recorded are refused or wait for ever: give more memory"
        )
    moved = before.bytes_in + before.bytes_out - after.bytes_in - after.bytes_out
    waited_s = mean(before.waits or [0.0]) - mean(after.waits or [0.0])
    parts = (_less(size, moved), _less(str, before.loads - after.loads, "loads"))
    return f"saved: {', '.join(parts)}, {_less(seconds, waited_s, 'of waiting an acquire')}"


def _less(shown: Callable[[Any], str], saved: float, what: str = "moved") -> str:
    return f"{'-' if saved < 0 else ''}{shown(abs(saved))} {what}"


def _pasted(work: RecordedWork, chunks: int, changes: Changes) -> dict[str, list[str]]:
    settings, commands = list[str](), list[str]()
    if chunks != work.start.chunks:
        settings.append(f'budget = "{paste.amount(chunks * work.start.chunk_bytes)}"')
    for (kind, name), value in changes.items():
        if kind == "rule":
            settings.append(f"{name.removesuffix('_s')} = {json.dumps(value)}")
        elif kind == "pin":
            commands.append(f"swapd {'pin' if value else 'unpin'} {shlex.quote(name)}")
        else:
            kept = value if value == "auto" else paste.amount(value)
            commands.append(f"swapd resize {shlex.quote(name)} {kept}")
    return {"settings": settings, "commands": commands}


def _block(pasted: dict[str, Any]) -> Iterator[str]:
    settings, commands = pasted["settings"], pasted["commands"]
    yield f"\n# at {pasted['budget']}" + ("" if settings or commands else ": nothing to change")
    if settings:
        yield from ("# in the daemon's configuration file:", *settings)
    if commands:
        yield from ("# once its stages run:", *commands)
