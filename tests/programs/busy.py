"""Measures a little work while another process computes on the same CPU, and prints the load."""

import os
import subprocess
import sys

from swapd.bench.machine import Machine, too_busy


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spin = "print(flush=True)\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    assert spinning.stdout is not None
    spinning.stdout.readline()
    machine = Machine()
    machine.watch("work", lambda: sum(range(5_000_000)))
    spinning.kill()
    spinning.wait()
    found = machine.surroundings()
    print(too_busy(found.conditions["work"], found))  # noqa: T201


if __name__ == "__main__":
    main()
