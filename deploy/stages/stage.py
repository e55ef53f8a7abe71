"""A stage of run.toml: it takes turns with the others on one daemon."""

import argparse
import itertools
import time

import swapd

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("mib", type=int)
    parser.add_argument("--serve", action="store_true", help="take turns until told to end")
    parser.add_argument("--turns", type=int, default=1)
    given = parser.parse_args()
    with swapd.connect() as client:  # $SWAPD_ENDPOINT, which swapd run has set
        client.register(given.name, {"weights": bytearray(given.mib * MIB)})
        for turn in itertools.count(1) if given.serve else range(1, given.turns + 1):
            with client.acquire(given.name):
                print(f"turn {turn}")  # noqa: T201
            time.sleep(0.05)  # the others' turn


if __name__ == "__main__":
    main()
