"""One row of the result: figure, bound and verdict. Stdlib only."""

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, TextIO

#: "measured": a figure without a bound. "missing": not measured, for the reason in the note.
Verdict = Literal["ok", "failed", "measured", "missing"]

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Row:
    """`value` in `unit`, held against `bound` if there is one. `note` is for people."""

    section: str
    name: str
    value: Value
    unit: str = ""
    bound: str = ""
    verdict: Verdict = "measured"
    note: str = ""


class Check:
    """Takes a section's rows; each is sent at once."""

    def __init__(self, section: str, out: TextIO, *, judges_times: bool = True) -> None:
        """Without `judges_times`, as on the stub, bounds on times are not judged."""
        self._section = section
        self._out = out
        self._judges_times = judges_times

    def row(self, name: str, value: Value, unit: str = "", note: str = "") -> None:
        """A figure without a bound, for information."""
        self._put(Row(self._section, name, value, unit, note=note))

    def faster(
        self, name: str, value: float, at_least: float, unit: str = "", note: str = ""
    ) -> None:
        """A bound on a ratio of times, the larger the better."""
        self._timed(name, value, unit, f"at least {at_least:g}", value >= at_least, note)

    def slower(
        self, name: str, value: float, at_most: float, unit: str = "", note: str = ""
    ) -> None:
        """A bound on a time or a ratio of times, the smaller the better."""
        self._timed(name, value, unit, f"at most {at_most:g}", value <= at_most, note)

    def at_most(
        self, name: str, value: float, bound: float, unit: str = "", note: str = ""
    ) -> None:
        """A bound on a count, which holds anywhere."""
        self._bounded(name, value, unit, f"at most {bound:g}", value <= bound, note)

    def holds(self, name: str, held: bool, note: str = "") -> None:
        """A guarantee: it holds, or it does not."""
        self._bounded(name, "holds" if held else "broken", "", "holds", held, note)

    def passed(self, name: str, seconds: float) -> None:
        """A test that has passed, and its seconds."""
        self._bounded(name, seconds, "s", "passes", True, "")

    def missing(self, name: str, why: str) -> None:
        """A figure that could not be measured here."""
        self._put(Row(self._section, name, None, verdict="missing", note=why))

    def failed(self, name: str, why: str) -> None:
        self._put(Row(self._section, name, None, verdict="failed", note=why))

    @contextmanager
    def part(self, name: str, *, guarantee: bool = False) -> Iterator[None]:
        """An error inside costs this one row; in a `guarantee` it is a failure."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other rows are wanted
            why = f"{type(exc).__name__}: {exc}"
            (self.failed if guarantee else self.missing)(name, why)

    def _timed(self, name: str, value: float, unit: str, bound: str, held: bool, note: str) -> None:
        if self._judges_times:
            self._bounded(name, value, unit, bound, held, note)
        else:
            self._put(Row(self._section, name, value, unit, bound, note=note))

    def _bounded(
        self, name: str, value: Value, unit: str, bound: str, held: bool, note: str
    ) -> None:
        verdict: Verdict = "ok" if held else "failed"
        self._put(Row(self._section, name, value, unit, bound, verdict, note))

    def _put(self, row: Row) -> None:
        self._out.write(json.dumps(asdict(row)) + "\n")
        self._out.flush()


def spread(values: list[float], factor: float = 1.0) -> str:
    """Median and extremes of some figures, for a note: "median 1.2 (1.1 to 1.9, 11 times)"."""
    low, high = min(values) * factor, max(values) * factor
    middle = statistics.median(values) * factor
    return f"median {middle:.3g} ({low:.3g} to {high:.3g}, {len(values)} times)"
