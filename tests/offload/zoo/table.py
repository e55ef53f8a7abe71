"""The zoo's results as a page: README.md beside this file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.offload.zoo.entries import FAMILIES
from tests.offload.zoo.keeper import Row

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- the table -->\n", "<!-- the end of the table -->\n"

_STAGES = ("attached", "evicted", "grad mode", "detached", "whole", "parts", "streamed")
_HEAD = f"| class | oddity | components | {' | '.join(_STAGES)} |"
_SHORT = {"same": "=", "frozen": "= frozen", "no blocks": "-", "no parts": "-"}


def table_of(rows: Sequence[Row]) -> str:
    """In Markdown, a table for each family; notes below it for failing cells."""
    said: list[str] = []
    lines: list[str] = []
    for family in FAMILIES:
        some = [row for row in rows if row.entry.family == family]
        if some:
            lines += ["", f"### {family}: {len(some)}", "", _HEAD, "| --- " * 10 + "|"]
            lines += [_line(row, said) for row in some]
    notes = [f"{number}. {text}" for number, text in enumerate(said, 1)]
    return "\n".join([*lines, "", *notes, ""]).lstrip("\n")


def _line(row: Row, said: list[str]) -> str:
    cells = [row.entry.name, row.entry.oddity, _components(row)]
    for stage in _STAGES:
        cell = _cell(row.outcomes.get(stage, ""), said)
        cells.append(f"{cell} {row.blocks} blocks" if stage == "streamed" and row.blocks else cell)
    return f"| {' | '.join(cells)} |"


def _components(row: Row) -> str:
    found = ", ".join(row.components)
    return f"{found}; {row.left:.0%} stays" if row.left >= 0.005 else found


def _cell(outcome: str, said: list[str]) -> str:
    if not outcome or outcome in _SHORT:
        return _SHORT.get(outcome, "")
    text = " ".join(outcome.split()).replace("|", "\\|")
    if text not in said:
        said.append(text)
    word = text.partition(":")[0]
    return f"{word} ({said.index(text) + 1})"


def problems_of(rows: Iterable[Row]) -> list[str]:
    return [f"{row.entry.name}: {problem}" for row in rows for problem in row.problems()]


def written() -> str:
    """The table on the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write(table: str) -> None:
    """Put it into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
