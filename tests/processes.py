"""Python in a process of its own: for programs that crash, fork, or need a fresh start."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import AnyStr

from tests import forked

ROOT = Path(__file__).parent.parent

#: Both source roots, as in an installation; and where this process's packages may be.
_INHERITED = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # noqa: TID251
PYTHONPATH = os.pathsep.join(
    dict.fromkeys(filter(None, [str(ROOT), str(ROOT / "client"), *_INHERITED]))
)
NOTHING: Mapping[str, str] = {}
#: A program whose text contains one of these imports torch.
WITH_TORCH = ("torch", "tests.offload", "swapd_client.vllm.stage")


def run_python(
    program: str | Path,
    *args: object,
    fds: Sequence[int] = (),
    env: Mapping[str, str] = NOTHING,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `program` to its end, well or not; it inherits `fds`, under the same numbers.

    A program is text, or the path of a file. Its environment contains `env` and the path of the
    sources, no more. `anew`: nothing is imported before it starts.
    """
    make = subprocess.Popen if anew else forked.Popen
    with _start(
        make, program, args, fds, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def output_of(
    program: str | Path,
    *args: object,
    fds: Sequence[int] = (),
    env: Mapping[str, str] = NOTHING,
    anew: bool = False,
) -> str:
    """The output of `program`, which must succeed."""
    done = run_python(program, *args, fds=fds, env=env, anew=anew)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def start_python(
    program: str | Path,
    *args: object,
    fds: Sequence[int] = (),
    env: Mapping[str, str] = NOTHING,
    imported: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start `program` with pipes; use it in a `with` block, which waits for its end.

    `imported`: its slow imports.
    """
    make = partial(forked.Popen, imported=tuple(imported)) if imported else forked.Popen
    return _start(make, program, args, fds, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _start(
    make: Callable[..., "subprocess.Popen[str]"],
    program: str | Path,
    args: Sequence[object],
    fds: Sequence[int],
    env: Mapping[str, str],
    **pipes: int,
) -> "subprocess.Popen[str]":
    text = program.read_text() if isinstance(program, Path) else dedent(program)
    if make is forked.Popen and any(name in text for name in WITH_TORCH):
        make = partial(forked.Popen, imported=("torch",))
    words = [str(program)] if isinstance(program, Path) else ["-c", text]
    return make(
        [sys.executable, *words, *map(str, args)],
        env={"PYTHONPATH": PYTHONPATH, **env},
        pass_fds=tuple(fds),
        text=True,
        **pipes,
    )


def line_of(process: "subprocess.Popen[AnyStr]") -> AnyStr:
    """The next line of its output."""
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: "subprocess.Popen[str]", line: str = "") -> None:
    """Write a line to its input."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
