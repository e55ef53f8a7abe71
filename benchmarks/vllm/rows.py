"""The rows of a measurement, and their table."""

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

#: Two prompts each, and the number of tokens of each answer: published figures are of these.
REQUESTS = [[[5 + number, 6, 7, 8], [9, 10 + number]] for number in range(6)]
TOKENS = 16

Sense = Literal["at least", "at most"]


class Row(msgspec.Struct, frozen=True):
    """One figure; without a bound it is for information."""

    what: str
    figure: float | None  # None: not measured, for the reason in `note`
    sense: Sense | None = None
    bound: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        if self.sense is None or self.bound is None or self.figure is None:
            return True
        at_least = self.sense == "at least"
        return self.figure >= self.bound if at_least else self.figure <= self.bound


class Section(msgspec.Struct, frozen=True):
    """One measurement: its rows, and their raw figures, in seconds by default."""

    rows: tuple[Row, ...]
    raw: dict[str, list[float]]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratios of figures taken in pairs."""
    return [a / b for a, b in zip(over, under, strict=True)]


def table(sections: Sequence[Section]) -> str:
    """A Markdown table."""
    lines = ["| what | figure | bound | |", "| --- | --- | --- | --- |"]
    for row in (row for section in sections for row in section.rows):
        figure = "" if row.figure is None else f"{row.figure:.3g}"
        bound = "" if row.sense is None else f"{row.sense} {row.bound:g}"
        verdict = "" if row.holds else "**FAILED** "
        lines.append(f"| {row.what} | {figure} | {bound} | {verdict}{row.note} |")
    return "\n".join(lines)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
