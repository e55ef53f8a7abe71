"""Python in a process of its own: for what must crash, fork, or start from nothing."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from tests import forked

ROOT = Path(__file__).parent.parent

#: Both source roots, as an installation would have them.
PYTHONPATH = f"{ROOT}:{ROOT / 'client'}"
NOTHING: Mapping[str, str] = {}


def run_python(
    program: str, *args: object, fds: Sequence[int] = (), env: Mapping[str, str] = NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run `program` to its end, whatever that is; it inherits `fds`, by the same numbers.

    Of the environment it has `env` and the way to the sources, no more.
    """
    with _start(program, args, fds, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def output_of(
    program: str, *args: object, fds: Sequence[int] = (), env: Mapping[str, str] = NOTHING
) -> str:
    """What `program` prints. It must end well."""
    done = run_python(program, *args, fds=fds, env=env)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def start_python(
    program: str, *args: object, fds: Sequence[int] = (), env: Mapping[str, str] = NOTHING
) -> "subprocess.Popen[str]":
    """Start `program` with pipes; use it in a `with` block, which waits for its end."""
    return _start(program, args, fds, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _start(
    program: str, args: Sequence[object], fds: Sequence[int], env: Mapping[str, str], **pipes: int
) -> "subprocess.Popen[str]":
    return forked.Popen(
        [sys.executable, "-c", dedent(program), *map(str, args)],
        imported=("torch",) if "torch" in program else (),
        env={"PYTHONPATH": PYTHONPATH, **env},
        pass_fds=tuple(fds),
        text=True,
        **pipes,
    )
