"""Runs a program without some modules: `python without.py MODULE,... PROGRAM ...`.

PROGRAM is `swapd`, with its arguments, or Python code.
"""

import sys


class Blocked:
    """A finder that raises for these modules."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    sys.meta_path.insert(0, Blocked(set(sys.argv[1].split(","))))
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "swapd":
        from swapd.cli import main

        main()
    else:
        exec(sys.argv[0], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
