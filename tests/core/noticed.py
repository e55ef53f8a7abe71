"""The scenario that noticed each seeded bug, to play it first. It decides nothing else.

A bug that is not in `noticed.json`, or that this scenario no longer notices, meets all scenarios;
that takes longer. `python -m tests.core.noticed` writes the file anew, in a minute or two.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("noticed.json")


def read() -> dict[str, str]:
    """The names of scenarios, by the names of bugs."""
    known: dict[str, str] = json.loads(FILE.read_text())
    return known


def write() -> None:
    from tests.core import test_mutations

    found = {bug.name: test_mutations.noticed_by(bug) for bug in test_mutations.BUGS}
    known = {bug: scenario for bug, scenario in sorted(found.items()) if scenario}
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    write()
