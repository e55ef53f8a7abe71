"""The two files of a run: JSON for programs, a table for people. Stdlib only."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.plan import SECTIONS, WARM, Section
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.runner import Ended

_MARKS = {"ok": "ok", "failed": "**FAILED**", "measured": "", "missing": "not measured"}


@dataclass
class Report:
    """The results of a run so far. `write` may be called after each row."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    sections: tuple[Section, ...]
    stub: bool
    rows: list[Row] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    complete: bool = False

    @property
    def to_run(self) -> tuple[Section, ...]:
        """Sections that no earlier run has completed."""
        done = {each.module for each in self.ended}
        return tuple(section for section in self.sections if section.module not in done)

    def resume(self, base: Path) -> list[str]:
        """Take over sections that an earlier run into `base` has completed; return their names.

        Only from the same tree, on a machine of the same kind, with the same settings.
        """
        try:
            before = json.loads(base.with_name(f"{base.name}.json").read_bytes())
        except (OSError, ValueError):
            return []
        now = json.loads(self._json())
        if _conditions(before) != _conditions(now):
            return []
        ended = [Ended(**each) for each in before["sections"]]
        kept = [each for each in ended if not each.how and each.module != WARM.module]
        names = {each.module for each in kept}
        self.ended += kept
        self.rows += [row for row in map(_row, before["rows"]) if row.section in names]
        return [each.module for each in kept]

    def count(self, verdict: str) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def summary(self) -> str:
        seconds = sum(each.seconds for each in self.ended)
        return (
            f"{self.count('ok')} ok, {self.count('failed')} failed, "
            f"{self.count('missing')} not measured, {self.count('measured')} without a bound; "
            f"{seconds:.0f} s"
        )

    def write(self, base: Path) -> None:
        """Replace `base`.json and `base`.md, each at once."""
        _replace(base.with_name(f"{base.name}.json"), self._json())
        _replace(base.with_name(f"{base.name}.md"), self._markdown())

    def _json(self) -> str:
        whole = {
            "stub": self.stub,
            "complete": self.complete,
            "machine": self.machine,
            "settings": self.settings,
            "summary": self.summary(),
            "rows": [asdict(row) for row in self.rows],
            "sections": [asdict(each) for each in self.ended],
        }
        return json.dumps(whole, indent=1) + "\n"

    def _markdown(self) -> str:
        lines = [f"# gpu-check: {self.machine.get('gpu', 'unknown GPU')}", ""]
        if self.stub:
            lines += ["**On the stub driver: no figure here says anything about a GPU.**", ""]
        lines += [f"{self.machine.get('date', '')}. {self.summary()}."]
        if not self.complete:
            lines += ["", "**Incomplete: the run was ended before its end.**"]
        for section in dict.fromkeys((WARM, *SECTIONS, *self.sections)):
            lines += self._section(section)
        return "\n".join(lines) + "\n"

    def _section(self, section: Section) -> list[str]:
        rows = [row for row in self.rows if row.section == section.module]
        if not rows:
            return []
        lines = ["", f"## {section.title} ({section.group})", ""]
        lines += ["| what | figure | bound | | note |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            cells = (row.name, figure(row), row.bound, _MARKS[row.verdict], row.note)
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        return lines


def _conditions(run: dict[str, Any]) -> tuple[object, ...]:
    """What must be the same for rows of a run to count in another: of the machine, its kind."""
    return {**run.get("machine", {}), "uuid": ""}, run.get("settings"), run.get("stub")


def _row(fields: dict[str, Any]) -> Row:
    return Row(**fields)


def figure(row: Row) -> str:
    """The value as text."""
    if row.value is None:
        return ""
    if isinstance(row.value, float):
        return f"{_rounded(row.value)} {row.unit}".strip()
    return f"{row.value} {row.unit}".strip()


def line(row: Row) -> str:
    """One row for a terminal."""
    verdict = {"measured": "", "missing": "not measured"}.get(row.verdict, row.verdict)
    bound = f" ({row.bound})" if row.bound and row.bound != "holds" else ""
    note = f"  # {row.note}" if row.note else ""
    return f"  {verdict:>12}  {row.name}: {figure(row)}{bound}{note}"


def _rounded(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
