"""The process of one section: `python -m benchmarks.gpu_check.section MODULE SETTINGS FD`.

Its rows go to the descriptor FD, one JSON object a line; its output is for the log.
"""

import importlib
import os
import sys

from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings


def main(module: str, settings: str, fd: str) -> None:
    os.set_inheritable(int(fd), False)  # workers and daemons must not hold it
    section = importlib.import_module(f"benchmarks.gpu_check.{module}")
    with open(int(fd), "w", encoding="utf-8") as out:
        told = Settings.decode(settings)
        section.measure(Check(module, out, judges_times=not told.stub), told)


if __name__ == "__main__":
    main(*sys.argv[1:])
