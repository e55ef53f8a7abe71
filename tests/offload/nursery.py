"""Processes that may crash, one for each program, forked from one that has imported torch.

`python nursery.py MODULE...` is that one, with these modules imported, too. Each line of its stdin
is a JSON list: a program and its arguments, as `python` takes them. A child runs it. A line of
stdout has the child's exit status (negative for a signal) and its output.
"""

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests import forked
from tests.guarantees.harness import Daemon, environment


@contextmanager
def strict_daemon(budget: str = "16MiB", **settings: Any) -> Iterator[Daemon]:
    """A daemon for which an access without a lease is a fault; checked at the end."""
    # a short path, since it contains sockets
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    daemon = Daemon(folder / "d", folder / "log", budget=budget, **settings)
    try:
        yield daemon
        daemon.close()
    finally:
        daemon.discard()
        shutil.rmtree(folder, ignore_errors=True)


class Nursery:
    """Runs programs one after the other."""

    def __init__(self, *imported: str) -> None:
        """`imported`: modules that are imported once, for all programs."""
        self._process = forked.Popen(
            [sys.executable, __file__, *imported],
            imported=("torch",),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str | Path, *args: object) -> tuple[int, str]:
        """The exit status and output of a process that runs `program`, text or a file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = [str(program)] if isinstance(program, Path) else ["-c", dedent(program)]
        self._process.stdin.write(json.dumps([*words, *map(str, args)]) + "\n")
        self._process.stdin.flush()
        status, said = json.loads(self._process.stdout.readline())
        return status, said

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.communicate()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    gc.disable()  # until all is imported: none of it is garbage
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # a child's collections would copy all shared pages
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.dup2(writing, 1)
            os._exit(_run(json.loads(line)))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), said]) + "\n")
        sys.stdout.flush()


def _run(argv: list[str]) -> int:
    try:
        forked.run(argv)
    except BaseException:  # noqa: BLE001 - whoever asked sees it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    _serve()
