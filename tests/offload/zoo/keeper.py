"""Runs entries, each in a process that may die, forked from one that has its libraries already."""

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.offload.nursery import Nursery
from tests.offload.zoo.entries import FAMILIES, Entry

#: In the order in which they run: the tries of a class, and the stages of each.
STAGES = {
    "attached": ("attached", "evicted", "grad mode", "detached"),
    "whole": ("whole",),
    "parts": ("parts",),
    "streamed": ("streamed",),
}
#: If a larger share of its parameters stays private, a warning must say so.
MOST_LEFT = 0.2

_PROGRAM = """
import os
os.dup2(1, 2)  # what it says as it dies belongs to it
from tests.offload.zoo.stages import run_entry
run_entry({name!r}, {folder!r}, {tries!r})
"""


@dataclass
class Row:
    """The results of an entry, by stage."""

    entry: Entry
    outcomes: dict[str, str]
    components: list[str] = field(default_factory=list)
    #: The share of its parameters' bytes in no component.
    left: float = 0.0
    warned: list[str] = field(default_factory=list)
    #: The summary of the attachment.
    summary: str = ""
    nbytes: int = 0
    blocks: int = 0
    #: All it printed.
    printed: str = ""

    def problems(self) -> list[str]:
        """The failures; none if it works or states why not."""
        found = [
            f"{stage}: {outcome}"
            for stage, outcome in self.outcomes.items()
            if not self._expected(stage, outcome)
        ]
        if self.left > MOST_LEFT and not any("stay" in text for text in self.warned):
            found.append(f"{self.left:.0%} of its parameters stay private, and no warning says so")
        if self.entry.told not in "\n".join([self.summary, *self.warned]):
            found.append(f"attach does not say {self.entry.told!r}, but: {self.summary}")
        return found

    def _expected(self, stage: str, outcome: str) -> bool:
        if stage in self.entry.said:
            return self.entry.said[stage] in outcome
        return outcome in ("same", "frozen", "no blocks", "no parts")


class Keeper:
    """One process for the entries that need the same libraries; use it in a `with` block."""

    def __init__(self, families: Iterable[str]) -> None:
        modules = dict.fromkeys(module for family in families for module in FAMILIES[family])
        entries = (f"{__package__}.{family}" for family in FAMILIES)  # each child looks at all
        self._nursery = Nursery(*modules, "tests.offload.zoo.stages", *entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.close()

    def run(self, entry: Entry, folder: Path) -> Row:
        """Blocks until all tries are done, in more processes if it dies in some.

        `folder`: of a daemon.
        """
        row = Row(entry, {})
        left = list(STAGES)
        while left:
            program = _PROGRAM.format(name=entry.name, folder=str(folder), tries=left)
            status, printed = self._nursery.run(program)
            row.printed += printed
            last = "plain"
            for line in printed.splitlines():
                if line.startswith('{"stage"'):
                    last = _take(row, **json.loads(line))
            if not status:
                break
            row.outcomes[last] = _death(status, printed)
            tried = next((n for n, one in enumerate(left) if last in STAGES[one]), len(left))
            left = left[tried + 1 :]
        return row


def _take(row: Row, stage: str, outcome: str, **more: Any) -> str:
    row.outcomes[stage] = outcome
    for name, value in more.items():
        setattr(row, name, value)
    return stage


def _death(status: int, printed: str) -> str:
    """How it ended, swapd's message, and the line of the library that did it."""
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    if "Timeout (" in printed:
        how = "it hung"
    explained = re.search(r"^swapd: (a fault in component '[^']*')", printed, re.MULTILINE)
    stack = printed.partition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'File ".*/([^"/]+/[^"/]+\.py)", line (\d+) in (\w+)', stack)
    where = [f"{file}:{line} {what}" for file, line, what in frames if not file.startswith("nn/")]
    parts = [f"died: {how}", explained.group(1) if explained else "", *where[:1]]
    return ", ".join(part for part in parts if part)
