"""The comparisons of `swapd run --compare`: their figures, tables, and files in one folder."""

import shlex
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from swapd.cli.common import columns, console, note, say, say_error
from swapd.run.outcome import Outcome
from swapd.shared import config
from swapd.shared.text import plain
from swapd.shared.units import seconds, size

WITHOUT, WITH = "without swapd", "with swapd"
_NOT_MEASURED = "not measured"


class Round(msgspec.Struct, frozen=True):
    status: int
    whole_s: float = 0.0
    ready_s: float | None = None
    load_s: float | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    #: One for each daemon; empty without swapd.
    outcomes: tuple[Outcome, ...] = ()
    #: The reason for `status`, if the command itself did not end with it.
    why: str = ""
    #: A signal that `swapd run` received and passed on.
    signal: int | None = None


class Side(msgspec.Struct, frozen=True):
    """One side of a comparison. `settings`: those that differ, by name; None without swapd."""

    name: str
    settings: dict[str, str] | None
    rounds: tuple[Round, ...] = ()

    @property
    def failed(self) -> Round | None:
        return next((each for each in self.rounds if each.status), None)

    @property
    def good(self) -> list[Round]:
        return [each for each in self.rounds if not each.status]


class Comparison(msgspec.Struct, frozen=True):
    version: Literal[1]
    command: tuple[str, ...]
    sides: tuple[Side, Side]

    @property
    def status(self) -> int:
        return next((failed.status for side in self.sides if (failed := side.failed)), 0)


class _Measure(NamedTuple):
    what: str
    of: Callable[[Round], float | None]
    shown: Callable[[float], str]
    #: Whether it exists without a daemon.
    bare: bool = True
    #: Whether the table omits it if neither side has a value.
    optional: bool = False


def _of_daemons(of: Callable[[Outcome], float]) -> Callable[[Round], float | None]:
    return lambda each: sum(map(of, each.outcomes)) if each.outcomes else None


_MEASURES = (
    _Measure("whole time", lambda r: r.whole_s, seconds),
    _Measure("until it was ready", lambda r: r.ready_s, seconds, optional=True),
    _Measure("the load", lambda r: r.load_s, seconds, optional=True),
    _Measure("waited, all requests", _of_daemons(lambda o: o.waited_s), seconds, bare=False),
    _Measure("swaps", _of_daemons(lambda o: o.swaps), "{:g}".format, bare=False),
    _Measure("copied in", _of_daemons(lambda o: o.bytes_in), size, bare=False),
    _Measure("copied out", _of_daemons(lambda o: o.bytes_out), size, bare=False),
    _Measure("arena, at most", _of_daemons(lambda o: o.peak_bytes), size, bare=False),
    _Measure("device memory, at most", lambda r: r.device_bytes, size),
    _Measure("host memory, at most", lambda r: r.host_bytes, size),
)
ABOUT = (
    "device memory: by NVML, without that in use before; host memory: by /proc, each 0.1 s, "
    "private memory of all processes, and their shared memory once, the daemon's too"
)


def rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    made = []
    for measure in _MEASURES:
        values = [_median(measure, side.good) for side in found.sides]
        if not (measure.optional and values == [None, None]):
            first, second = map(_shown, (measure, measure), found.sides, values)
            made.append((measure.what, first, second, _ratio(*values)))
    return made


def _median(measure: _Measure, rounds: Sequence[Round]) -> float | None:
    values = [value for each in rounds if (value := measure.of(each)) is not None]
    return median(values) if values else None


def _shown(measure: _Measure, side: Side, value: float | None) -> str:
    if value is not None:
        return measure.shown(value)
    if not side.good:
        return "failed" if side.failed else _NOT_MEASURED
    return "" if side.settings is None and not measure.bare else _NOT_MEASURED


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.3g}" if first and second is not None else ""


def better(found: Comparison) -> tuple[Side, str] | None:
    """Return the side with the better settings, and the reason; None if neither is better.

    Against a run without swapd, that is the side with swapd, if its command succeeds. Against other
    settings, it is the side with the shorter load, or else the shorter whole time.
    """
    first, second = found.sides
    if any(not side.good or side.failed for side in found.sides if side.settings is not None):
        return None
    times = [_time(side) for side in found.sides]
    if first.settings is None:
        ratio = _ratio(*times)
        return second, f"{ratio} times the time without swapd" if ratio else "fails without swapd"
    by_time = sorted(zip(times, found.sides, strict=True), key=lambda timed: timed[0] or 0.0)
    (least, winner), (most, loser) = by_time
    return winner, f"{_ratio(most, least)} times the time with {loser.name}"


def _time(side: Side) -> float | None:
    """Return the deciding time. The whole time of a server includes its start."""
    loads = [each.load_s for each in side.good if each.load_s is not None]
    return median(loads or [each.whole_s for each in side.good]) if side.good else None


_LISTED_MAX = 20


def table(found: Comparison) -> RenderableType:
    headings = ("", *(plain(side.name) for side in found.sides), "ratio")
    cells = {heading: itemgetter(column) for column, heading in enumerate(headings)}
    count = max(len(side.rounds) for side in found.sides)
    about = f"medians of {count} rounds; {ABOUT}" if count > 1 else ABOUT
    return Group(columns(cells, rows(found), left=("",)), Text(about, "dim"))


def _folder() -> Path:
    return config.state_folder() / "comparisons"


def write(name: str, suffix: str, data: bytes, use: str) -> None:
    path = _folder() / f"{name}{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
    except OSError as exc:
        say_error(f"{path} is not written: {exc.strerror}; $XDG_STATE_HOME names another place")
    else:
        note(f"{path}: {use}")


def list_all() -> None:
    paths = sorted(_folder().glob("*.json"))[-_LISTED_MAX:]
    if not paths:
        console.print("nothing was compared yet; start with: swapd run --compare -- COMMAND")
    for path in paths:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Comparison)
        except (OSError, msgspec.MsgspecError) as exc:
            say_error(f"{path} cannot be read: {exc}; remove it")
            continue
        say(f"{path.stem}  status {found.status}  {shlex.join(found.command)}")
        console.print(table(found))
        if (settings := path.with_suffix(".toml")).exists():
            say(f"the better settings: {settings}")
