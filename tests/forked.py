"""Processes of Python that start in a fraction of the time.

`Popen` is `subprocess.Popen` for `[sys.executable, ...]`: the process is forked from one that has
imported what daemons and workers need, instead of importing it anew. It is a child of this process
as any other, with the arguments, environment and files that it was given.

`python -m tests.forked FD` is the process that forks; orders come on the socket FD. One that has
imported more is forked from it, so that what takes long is imported once.
"""

import atexit
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
from collections.abc import Callable, Mapping, Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from itertools import takewhile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: What daemons and workers import, but torch.
IMPORTED = (
    "uvloop",
    "yaml",
    "rich.console",
    "tests.commanded_once",
    "swapd.daemon.daemon",
    "swapd_client",
    "tests.guarantees.worker",
)
#: And those that have the fake CUDA driver.
WITH_A_DRIVER = ("cuda.bindings.driver", "pynvml")
ORDER_MAX_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36

#: Variables that count when a process starts, and not later: a process that forks is started for
#: each set of them.
AT_START = ("LD_", "OMP_", "PYTHONPATH", "PYTHONMALLOC")
#: Packages of which a process that ends tears its modules down, as one that was started does.
TORN_DOWN = ("__main__", "builtins", "sys", "swapd", "swapd_client", "tests", "benchmarks")

AtStart = tuple[tuple[str, str], ...]

#: Whether what a process forks starts processes so, too.
HERE, EVERYWHERE = "here", "everywhere"

_libc = ctypes.PyDLL(None)
_lock = threading.Lock()
_Anew = subprocess.Popen

#: What is imported everywhere, in a process that starts its own so; else nothing.
_everywhere: list[str] = []
#: The modules that there were before the fork, and those of them that `_keep_whole` does not keep.
_imported: list[str] = []
_torn_down: list[str] = []
#: With which the program ended, before its interpreter does.
_statuses: list[int | None] = []
_servers: "dict[tuple[AtStart, str, tuple[str, ...]], _Server]" = {}


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; what a fork cannot give, such as a `preexec_fn`, is given as there.

    `imported`: what the program imports that takes long, such as torch. `everywhere`: so do the
    Pythons that it starts, and what these start: they are forked, too.
    """

    def __init__(
        self,
        args: Any,
        *,
        imported: Sequence[str] = (),
        everywhere: bool = False,
        **options: Any,
    ) -> None:
        self._imported = tuple(imported)
        self._where = EVERYWHERE if everywhere or subprocess.Popen is Popen else HERE
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *others = rest
        files = stdin, _, _, stdout, _, stderr = others[:6]
        _, gid, gids, uid, umask, session, group = others[6:]
        plain = (preexec_fn, shell, gid, gids, uid, umask, group)
        if plain != (None, False, None, None, None, -1, -1) or not _is_python(args):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        order = {
            "argv": [os.fspath(word) for word in args[1:]],
            "env": dict(os.environ if env is None else env),  # noqa: TID251
            "cwd": os.fspath(cwd or Path.cwd()),
            "fds": [0, 1, 2, *pass_fds],
            "session": session,
        }
        standard = [i if fd == -1 else fd for i, fd in enumerate((stdin, stdout, stderr))]
        self.pid = _fork(order, [*standard, *pass_fds], self._where, self._imported)
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _fork(order: dict[str, Any], fds: Sequence[int], where: str, imported: Sequence[str]) -> int:
    bindings = WITH_A_DRIVER if "FAKECUDA_DIR" in order["env"] else ()
    modules = tuple(dict.fromkeys((*_everywhere, *imported, *bindings)))
    return _server(_at_start(order["env"]), where, modules).fork(json.dumps(order), fds)


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

    def __init__(self, orders: socket.socket, wait: Callable[[], object]) -> None:
        """`wait` for its end, as only its parent can."""
        self._socket = orders
        weakref.finalize(self, _end, orders, wait, os.getpid())

    def fork(self, order: str, fds: Sequence[int]) -> int:
        """Have a process made; return its pid. Orphans become children of this process meanwhile:
        that is how it becomes one, when the process between the two ends."""
        with _lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [order.encode()], fds)
                pid, yours = sorted(self._socket.recv(64) for _ in range(2))
                assert yours == b"it is yours"
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return int(pid)


def _end(orders: socket.socket, wait: Callable[[], object], owner: int) -> None:
    if os.getpid() == owner:
        orders.shutdown(socket.SHUT_RDWR)  # what was forked of this process may have it, too
        wait()
    orders.close()


def _server(at_start: AtStart, where: str, imported: tuple[str, ...]) -> _Server:
    """The one with these; it is made when it is first asked for."""
    key = at_start, where, imported
    if key not in _servers:
        if imported:
            nearest = ("torch",) if "torch" in imported and imported != ("torch",) else ()
            _servers[key] = _forked(_server(at_start, HERE, nearest), where, imported)
        else:
            basic = _started(at_start)
            _servers[key] = basic if where == HERE else _forked(basic, where, ())
    return _servers[key]


def _started(at_start: AtStart) -> _Server:
    others = {k: v for k, v in os.environ.items() if not k.startswith(AT_START)}  # noqa: TID251
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = _Anew(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            env={**others, **dict(at_start)},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return _Server(ours, process.wait)


def _forked(nearest: _Server, where: str, imported: Sequence[str]) -> _Server:
    """One that goes on from `nearest`, and imports what that one has not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        order = json.dumps({"where": where, "imported": imported})
        pid = nearest.fork(order, [theirs.fileno()])
    return _Server(ours, functools.partial(os.waitpid, pid, 0))


def _at_start(env: Mapping[str, str]) -> AtStart:
    found = {k: v for k, v in env.items() if k.startswith(AT_START)}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        paths = dict.fromkeys(found.get(name, "").split(os.pathsep))  # once is enough
        found[name] = os.pathsep.join(paths)
    return tuple(sorted((k, v) for k, v in found.items() if v))


# --- the process that forks --------------------------------------------------------------


def main(number: str) -> None:
    """Fork processes until the other end of the socket is closed; in each, do what it is for."""
    atexit.register(_keep_whole)  # the first, so that it is called last
    _import(IMPORTED)
    order = _serve(socket.socket(fileno=int(number)))
    try:
        run(order["argv"])
    except BaseException as error:
        _statuses.append(_status_of(error))
        raise
    _statuses.append(0)


def _import(names: Sequence[str]) -> None:
    """Have it as if it had always been there, for all that is forked."""
    gc.disable()  # until all is imported: nothing of that is garbage
    for name in names:
        importlib.import_module(name)
    _imported[:] = sys.modules
    _torn_down[:] = [name for name in _imported if name.partition(".")[0] in TORN_DOWN]
    # the libraries' own ends, 0.1 s of torch's, go with the pages
    for finalizer in vars(weakref.finalize)["_registry"]:
        finalizer.atexit = False
    _libc.on_exit(_libc._exit, None)
    gc.enable()
    gc.collect()
    gc.freeze()


def _fork_everywhere(imported: Sequence[str]) -> None:
    """Have what this process forks start processes so, too."""
    _everywhere.extend(imported)
    vars(subprocess)["Popen"] = Popen
    vars(importlib.import_module("multiprocessing.util"))["spawnv_passfds"] = _spawn


def _serve(orders: socket.socket) -> dict[str, Any]:
    """Fork a process for each order. Returns its order in each of them, and ends in this one.

    One that is to fork, too, goes on here.
    """
    where = HERE
    while True:
        said, fds, _, _ = socket.recv_fds(orders, ORDER_MAX_BYTES, 64)
        if not said:
            os._exit(0)
        order: dict[str, Any] = json.loads(said)
        forks = "where" in order
        if not forks and order["argv"][0].endswith(".py"):
            _compiled(order["argv"][0])
        between = _libc.fork()  # without what Python does afterwards: it only forks again
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            if not forks and order["session"]:
                os.setsid()
            orders.send(str(os.getpid()).encode())
            orders.close()
            if forks:
                orders, where = socket.socket(fileno=fds[0]), order["where"]
                _import(order["imported"])
                if where == EVERYWHERE:
                    _fork_everywhere(order["imported"])
                continue
            if where == EVERYWHERE and (own := _left_behind(order, fds)):
                orders = own
                continue
            _take(order, fds)
            return order
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
        orders.send(b"it is yours")


def _left_behind(order: dict[str, Any], fds: Sequence[int]) -> socket.socket | None:
    """Fork the process that forks for this one, while it is still as new as that one is to be.

    In this process None, in that one the socket on which its orders come.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        for fd in fds:
            os.close(fd)
        return theirs
    theirs.close()
    aside = fcntl(ours, F_DUPFD_CLOEXEC, max(order["fds"]) + 1)
    ours.close()
    server = _Server(socket.socket(fileno=aside), functools.partial(os.waitpid, pid, 0))
    _servers[_at_start(order["env"]), EVERYWHERE, tuple(_everywhere)] = server
    return None


def _spawn(_: object, args: Sequence[str], fds: Sequence[int]) -> int:
    """In place of what `multiprocessing` starts its processes with."""
    order = {
        "argv": args[args.index("-c") :],  # before it are options that this Python has, too
        "env": dict(os.environ),  # noqa: TID251
        "cwd": str(Path.cwd()),
        "fds": [0, 1, 2, *fds],
        "session": False,
    }
    return _fork(order, [0, 1, 2, *fds], EVERYWHERE, ())


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
    # the second name is that by which the interpreter has it at its end
    sys.stdin = vars(sys)["__stdin__"] = os.fdopen(0, closefd=False)
    sys.stdout = vars(sys)["__stdout__"] = _writing(1, at_once, "strict")
    sys.stderr = vars(sys)["__stderr__"] = _writing(2, at_once, "backslashreplace")


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


def _keep_whole() -> None:
    """Have what others wrote, and was imported before the fork, left as it is in the end.

    To take it apart costs a short process more than all that it does. What is imported later, what
    the program has made and swapd itself are torn down as ever.
    """
    later = list(takewhile(lambda name: name != _imported[-1], reversed(sys.modules)))
    names = [name for name in (*_torn_down, *reversed(later)) if name in sys.modules]
    torn = {name: sys.modules[name] for name in names}
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # as the interpreter does
    _exchange(sys.modules, torn)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torn))  # it has all the others now
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return  # the interpreter has words for that
    if _statuses[0] is not None:
        vars(sys)["its end"] = _End(_statuses[0])


def _exchange(one: dict[str, ModuleType], other: dict[str, ModuleType]) -> None:
    """Have each hold what the other held, without a touch of that: a page that is touched is
    copied."""
    held = [
        (ctypes.c_char * (dict.__basicsize__ - object.__basicsize__)).from_address(
            id(which) + object.__basicsize__
        )
        for which in (one, other)
    ]
    held[0].raw, held[1].raw = held[1].raw, held[0].raw


class _End:
    """The last that the interpreter tears down with the modules: what only it has, and would free
    after them, goes with the pages."""

    def __init__(self, status: int) -> None:
        self._exit = functools.partial(os._exit, status)

    def __del__(self) -> None:
        self._exit()


def _status_of(error: BaseException) -> int | None:
    """With which a program ends that raises `error`; None if that is by a signal."""
    match error:
        case KeyboardInterrupt():
            return None
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(status)):
            return status
        case _:
            return 1


if __name__ == "__main__":
    importlib.import_module("tests.forked").main(*sys.argv[1:])
