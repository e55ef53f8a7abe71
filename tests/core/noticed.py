"""Which scenario has noticed each seeded bug: the one to play first. It decides nothing else.

A bug that is not in `noticed.json`, or that this scenario notices no more, meets them all as ever;
that takes longer. `python -m tests.core.noticed` writes the file anew, in a minute or two.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("noticed.json")


def read() -> dict[str, str]:
    """The names of scenarios, by those of bugs."""
    known: dict[str, str] = json.loads(FILE.read_text())
    return known


def write() -> None:
    from tests.core import test_mutations

    found = {bug.name: test_mutations.noticed_by(bug) for bug in test_mutations.BUGS}
    known = {bug: scenario for bug, scenario in sorted(found.items()) if scenario}
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    write()
