"""Processes of Python that start in a fraction of the time.

`Popen` is `subprocess.Popen` for `[sys.executable, ...]`: the process is forked from one that has
imported what daemons and workers need, instead of importing it anew. It is a child of this process
as any other, with the arguments, environment and files that it was given.

`python -m tests.forked FD MODULE...` is the process that forks; orders come on the socket FD.
"""

import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: What daemons and workers import, but torch.
IMPORTED = (
    "uvloop",
    "rich.console",
    "swapd.cli.app",
    "swapd.daemon.daemon",
    "swapd_client",
    "tests.guarantees.worker",
)
ORDER_MAX_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36

#: Variables that count when a process starts, and not later: a process that forks is started for
#: each set of them.
AT_START = ("LD_", "OMP_", "PYTHONPATH", "PYTHONMALLOC")

_libc = ctypes.CDLL(None)
_lock = threading.Lock()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; what a fork cannot give, such as a `preexec_fn`, is given as there.

    `imported`: what the program imports that takes long, such as torch.
    """

    def __init__(self, args: Any, *, imported: Sequence[str] = (), **options: Any) -> None:
        self._imported = tuple(imported)
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *others = rest
        files = stdin, _, _, stdout, _, stderr = others[:6]
        _, gid, gids, uid, umask, session, group = others[6:]
        variables = dict(os.environ if env is None else env)  # noqa: TID251
        plain = (preexec_fn, shell, gid, gids, uid, umask, session, group)
        if plain != (None, False, None, None, None, -1, False, -1) or not _is_python(args):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        order = {
            "argv": [os.fspath(word) for word in args[1:]],
            "env": variables,
            "cwd": os.fspath(cwd or Path.cwd()),
            "fds": [0, 1, 2, *pass_fds],
        }
        at_start = {k: v for k, v in variables.items() if k.startswith(AT_START)}
        server = _server(tuple(sorted(at_start.items())), self._imported)
        standard = [i if fd == -1 else fd for i, fd in enumerate((stdin, stdout, stderr))]
        self.pid = server.fork(json.dumps(order), [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _is_python(args: Any) -> bool:
    """Whether it is a program of the Python that runs here, without options of Python's own."""
    return (
        not isinstance(args, str | bytes | os.PathLike)
        and len(args) > 1
        and args[0] == sys.executable
        and (args[1] in ("-c", "-m") or os.fspath(args[1]).endswith(".py"))
    )


class _Server:
    """The process that forks, and the socket to it. It ends with this process."""

    def __init__(self, env: dict[str, str], imported: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *imported],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        weakref.finalize(self, _end, self._socket, self._process)

    def fork(self, order: str, fds: Sequence[int]) -> int:
        """Have a process made; return its pid. Orphans become children of this process meanwhile:
        that is how it becomes one, when the process between the two ends."""
        with _lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [order.encode()], fds)
                pid = int(self._socket.recv(64))
                assert self._socket.recv(64) == b"it is yours"
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return pid


def _end(orders: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    orders.close()
    process.wait()


@functools.cache
def _server(at_start: tuple[tuple[str, str], ...], imported: tuple[str, ...]) -> _Server:
    others = {k: v for k, v in os.environ.items() if not k.startswith(AT_START)}  # noqa: TID251
    return _Server({**others, **dict(at_start)}, imported)


# --- the process that forks --------------------------------------------------------------


def _serve(orders: socket.socket) -> dict[str, Any]:
    """Fork a process for each order. Returns its order in each of them, and ends in this one."""
    while True:
        said, fds, _, _ = socket.recv_fds(orders, ORDER_MAX_BYTES, 64)
        if not said:
            os._exit(0)
        order: dict[str, Any] = json.loads(said)
        if order["argv"][0].endswith(".py"):
            _compiled(order["argv"][0])
        between = os.fork()
        if between == 0:
            if (pid := os.fork()) != 0:
                orders.send(str(pid).encode())
                os._exit(0)
            orders.close()
            _take(order, fds)
            return order
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
        orders.send(b"it is yours")


def _take(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Have in this process what it was given, by the numbers that it was given."""
    numbers = order["fds"]
    aside = [fcntl(fd, F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()  # noqa: TID251
    os.environ.update(order["env"])  # noqa: TID251
    os.chdir(order["cwd"])
    at_once = bool(order["env"].get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _writing(1, at_once, "strict")
    sys.stderr = _writing(2, at_once, "backslashreplace")


def _writing(fd: int, at_once: bool, errors: str) -> io.TextIOWrapper:
    """What a process that is started has there."""
    stream = os.fdopen(fd, "wb", 0 if at_once else -1, closefd=False)
    lines = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(stream, errors=errors, line_buffering=lines, write_through=at_once)


def run(argv: list[str]) -> None:
    """Do what `python *argv` does."""
    kind, *words = argv
    if kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-c":
        code = compile(words.pop(0), "<string>", "exec")
    else:
        code = _compiled(kind)
        sys.path.insert(0, str(Path(kind).parent))
        main.__file__ = kind
    sys.argv = [kind, *words]
    exec(code, vars(main))


@functools.cache
def _compiled(path: str) -> CodeType:
    return compile(Path(path).read_bytes(), path, "exec")


def _main() -> None:
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        order = _serve(orders)
    run(order["argv"])


if __name__ == "__main__":
    _main()
