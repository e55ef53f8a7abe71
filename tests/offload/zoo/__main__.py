"""`python -m tests.offload.zoo`: run all of the zoo, two classes at a time, and print its table.

Exits with 1 if a class fails without a stated reason; these classes are printed last.
"""

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from tests.offload.nursery import strict_daemon
from tests.offload.zoo.entries import FAMILIES, Entry, all_entries
from tests.offload.zoo.keeper import Keeper, Row
from tests.offload.zoo.table import problems_of, table_of, write

AT_A_TIME = 2
BUDGET = "24MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offload.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; default: all")
    parser.add_argument("--family", choices=list(FAMILIES), help="those of one family")
    parser.add_argument("--often", action="store_true", help="those that `make test` runs")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--verbose", action="store_true", help="all that they print")
    arguments = parser.parse_args()
    chosen = [
        one
        for one in all_entries()
        if (not arguments.names or one.name in arguments.names)
        and arguments.family in (None, one.family)
        and (one.often or not arguments.often)
    ]
    began = time.monotonic()
    rows = run_all(chosen, verbose=arguments.verbose)
    table = table_of(rows)
    if arguments.write:
        write(table)
    problems = problems_of(rows)
    seconds = time.monotonic() - began
    _say(f"\n{table}\n{len(rows)} classes in {seconds:.0f} s")
    _say("\n".join(problems) or "each holds, or says why it does not")
    return 1 if problems else 0


def run_all(entries: Sequence[Entry], *, verbose: bool = False) -> list[Row]:
    """In the given order."""
    waiting: SimpleQueue[Entry] = SimpleQueue()
    for one in entries:
        waiting.put(one)
    rows: dict[str, Row] = {}
    families = dict.fromkeys(one.family for one in entries)

    def work() -> None:
        with strict_daemon(BUDGET) as daemon, Keeper(families) as keeper:
            while True:
                try:
                    one = waiting.get_nowait()
                except Empty:
                    return
                began = time.monotonic()
                row = rows[one.name] = keeper.run(one, daemon.folder)
                said = row.printed if verbose else ""
                bad = "".join(f"\n    {problem}" for problem in row.problems())
                _say(f"{time.monotonic() - began:5.1f} s  {one.family:10}  {one.name}{bad}{said}")

    threads = [threading.Thread(target=work) for _ in range(min(AT_A_TIME, len(entries)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[one.name] for one in entries]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
