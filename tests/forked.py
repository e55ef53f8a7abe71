"""Python processes that start in a fraction of the time.

`Popen` is `subprocess.Popen` for `[sys.executable, ...]`: it forks the process from one that has
already imported the modules of daemons and workers. The new process is a child of this process like
any other, with the given arguments, environment and files.

`python -m tests.forked FD [LIBRARY]` is the process that forks; orders arrive on the socket FD. It
also forks processes with further imports: so each slow module is imported once. LIBRARY is a built
`aside.c`, without which a fork takes half as long again.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: The modules of daemons and workers, without torch.
IMPORTED = (
    "uvloop",
    "yaml",
    "rich.console",
    "tests.commanded_once",
    "swapd.daemon.daemon",
    "swapd_client",
    "tests.guarantees.worker",
)
#: And those of processes with the fake CUDA driver.
WITH_A_DRIVER = ("cuda.bindings.driver", "pynvml")
ORDER_MAX_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36

#: Variables that only count at the start of a process: each set of them has a forking process of
#: its own.
AT_START = ("LD_", "OMP_", "PYTHONPATH", "PYTHONMALLOC")
#: The modules of these packages are torn down at the end of a process, as in one that was not
#: forked.
TORN_DOWN = ("__main__", "builtins", "sys", "swapd", "swapd_client", "tests", "benchmarks")

AtStart = tuple[tuple[str, str], ...]

#: Whether the children of a process fork their own processes, too.
HERE, EVERYWHERE = "here", "everywhere"

_libc = ctypes.PyDLL(None)
_lock = threading.Lock()
_Anew = subprocess.Popen

#: The imports of all processes that a process with EVERYWHERE starts; else empty.
_everywhere: list[str] = []
#: The modules from before the fork, and those of them that `_keep_whole` does not keep.
_imported: list[str] = []
_torn_down: list[str] = []
#: The function of `aside.c`, if it is built.
_aside: list[Callable[[], int]] = []
#: The exit status of the program, set before its interpreter ends.
_statuses: list[int | None] = []
_servers: "dict[tuple[AtStart, str, tuple[str, ...]], _Server]" = {}


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; options that a fork cannot honour, such as a closure as `preexec_fn`,
    start a new process.

    `imported`: slow imports of the program, such as torch. `everywhere`: fork also the Pythons that
    it starts, and those that these start.
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
        plain = (shell, gid, gids, uid, umask, group) == (False, None, None, None, -1, -1)
        first = _pickled(preexec_fn)
        if not plain or first is None or not _is_python(args):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        order = {
            "argv": [os.fspath(word) for word in args[1:]],
            "env": dict(os.environ if env is None else env),  # noqa: TID251
            "cwd": os.fspath(cwd or Path.cwd()),
            "fds": [0, 1, 2, *pass_fds],
            "session": session,
            "first": first,
        }
        standard = [i if fd == -1 else fd for i, fd in enumerate((stdin, stdout, stderr))]
        self.pid = _fork(order, [*standard, *pass_fds], self._where, self._imported)
        self._child_created = True
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _fork(order: dict[str, Any], fds: Sequence[int], where: str, imported: Sequence[str]) -> int:
    bindings = WITH_A_DRIVER if "FAKECUDA_DIR" in order["env"] else ()
    modules = tuple(dict.fromkeys((*_everywhere, *imported, *bindings)))
    return _server(_at_start(order["env"]), where, modules).fork(json.dumps(order), fds)


def _pickled(function: Callable[[], object] | None) -> str | None:
    """None for a closure, which another process cannot have."""
    try:
        return "" if function is None else pickle.dumps(function, protocol=0).decode("ascii")
    except (AttributeError, pickle.PicklingError):
        return None


def _is_python(args: Any) -> bool:
    """Whether it runs a program with this Python, without options of Python's own."""
    return (
        not isinstance(args, str | bytes | os.PathLike)
        and len(args) > 1
        and args[0] == sys.executable
        and (args[1] in ("-c", "-m") or os.fspath(args[1]).endswith(".py"))
    )


def build(path: Path) -> None:
    """Build `aside.c`. Raises: OSError, subprocess.CalledProcessError."""
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
    source = Path(__file__).with_name("aside.c")
    subprocess.run(["cc", *flags, "-o", path, source], check=True)


def library() -> tuple[Path, ...]:
    """The built `aside.c`, if there is one. Tests replace this."""
    return ()


class _Server:
    """The process that forks, and the socket to it. It ends with this process."""

    def __init__(self, orders: socket.socket, wait: Callable[[], object]) -> None:
        """`wait` waits for its end, as only its parent can."""
        self._socket = orders
        weakref.finalize(self, _end, orders, wait, os.getpid())

    def fork(self, order: str, fds: Sequence[int]) -> int:
        """Start a process; return its pid. Orphans become children of this process meanwhile: so
        does the new one, when the process between the two ends.
        """
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
        orders.shutdown(socket.SHUT_RDWR)  # forked children of this process may have it, too
        wait()
    orders.close()


def _server(at_start: AtStart, where: str, imported: tuple[str, ...]) -> _Server:
    """The server with these properties, made at the first request."""
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
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *map(str, library())],
            env={**others, **dict(at_start)},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return _Server(ours, process.wait)


def _forked(nearest: _Server, where: str, imported: Sequence[str]) -> _Server:
    """A server forked from `nearest`, with the additional imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        order = json.dumps({"where": where, "imported": imported})
        pid = nearest.fork(order, [theirs.fileno()])
    return _Server(ours, functools.partial(os.waitpid, pid, 0))


def _at_start(env: Mapping[str, str]) -> AtStart:
    found = {k: v for k, v in env.items() if k.startswith(AT_START)}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        paths = dict.fromkeys(found.get(name, "").split(os.pathsep))  # each path once
        found[name] = os.pathsep.join(paths)
    return tuple(sorted((k, v) for k, v in found.items() if v))


# --- the process that forks --------------------------------------------------------------


def main(number: str, path: str = "") -> None:
    """Fork processes until the other end of the socket is closed; run the program in each."""
    atexit.register(_keep_whole)  # the first, so that it is called last
    if path:
        _aside.append(ctypes.PyDLL(path, use_errno=True).fork_aside)
    _import(IMPORTED)
    order = _serve(socket.socket(fileno=int(number)))
    try:
        run(order["argv"])
    except BaseException as error:
        _statuses.append(_status_of(error))
        raise
    _statuses.append(0)


def _import(names: Sequence[str]) -> None:
    """Import modules as if they had always been there, for all forked processes."""
    gc.disable()  # until all is imported: nothing imported is garbage
    for name in names:
        importlib.import_module(name)
    _imported[:] = sys.modules
    _torn_down[:] = [name for name in _imported if name.partition(".")[0] in TORN_DOWN]
    # the end of the process frees the libraries: their own cleanup takes 0.1 s for torch
    for finalizer in vars(weakref.finalize)["_registry"]:
        finalizer.atexit = False
    _libc.on_exit(_libc._exit, None)
    # nor is a function freed with the names of its module: that copied a quarter of all pages
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))
    gc.enable()
    gc.collect()
    gc.freeze()


def _fork_everywhere(imported: Sequence[str]) -> None:
    """Have the children of this process fork their own processes, too."""
    _everywhere.extend(imported)
    vars(subprocess)["Popen"] = Popen
    vars(importlib.import_module("multiprocessing.util"))["spawnv_passfds"] = _spawn


def _serve(orders: socket.socket) -> dict[str, Any]:
    """Fork a process for each order. Returns its order in each of them, and ends in this one.

    A child that will fork, too, continues here.
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
        owner = os.getppid()
        if _fork_aside():
            if not forks and order["session"]:
                os.setsid()
            if not forks and order["first"]:
                _await_parent(owner)  # it may be about its parent
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
            if order["first"]:
                pickle.loads(order["first"].encode("ascii"))()
            return order
        for fd in fds:
            os.close(fd)
        orders.send(b"it is yours")


def _await_parent(owner: int) -> None:
    """Block until `owner` has adopted this process, or has ended: then its socket is closed."""
    with suppress(ProcessLookupError):
        while os.getppid() != owner:
            os.kill(owner, 0)


def _fork_aside() -> bool:
    """Fork a process that is an orphan at once. Returns True in that process."""
    if not _aside:
        between = _libc.fork()  # without Python's work after a fork: it only forks again
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            return True
        os.waitpid(between, 0)
        return False
    ctypes.pythonapi.PyOS_BeforeFork()
    made = _aside[0]()
    if made == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return True
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if made < 0:
        raise OSError(ctypes.get_errno(), "no process could be forked")
    return False


def _left_behind(order: dict[str, Any], fds: Sequence[int]) -> socket.socket | None:
    """Fork the forking process of this process, while both are still new.

    Returns None in this process, and in the other the socket for its orders.
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
    """Replaces the function with which `multiprocessing` starts its processes."""
    order = {
        "argv": args[args.index("-c") :],  # the options before it are those of this Python, too
        "env": dict(os.environ),  # noqa: TID251
        "cwd": str(Path.cwd()),
        "fds": [0, 1, 2, *fds],
        "session": False,
        "first": "",
    }
    return _fork(order, [0, 1, 2, *fds], EVERYWHERE, ())


def _take(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Install the given files, under the given numbers, and the environment in this process."""
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
    # the interpreter uses the second name at its end
    sys.stdin = vars(sys)["__stdin__"] = os.fdopen(0, closefd=False)
    sys.stdout = vars(sys)["__stdout__"] = _writing(1, at_once, "strict")
    sys.stderr = vars(sys)["__stderr__"] = _writing(2, at_once, "backslashreplace")


def _writing(fd: int, at_once: bool, errors: str) -> io.TextIOWrapper:
    """The stream that a new process has there."""
    stream = os.fdopen(fd, "wb", 0 if at_once else -1, closefd=False)
    lines = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(stream, errors=errors, line_buffering=lines, write_through=at_once)


def run(argv: list[str]) -> None:
    """Run the program of `python *argv`."""
    kind, *words = argv
    sys.orig_argv = [sys.executable, *argv]
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
    """Keep the libraries that were imported before the fork whole at the end.

    Their teardown takes longer than a short process runs. Later imports, the program's own objects
    and swapd itself are torn down as always.
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
        return  # the interpreter reports that
    if _statuses[0] is not None:
        vars(sys)["its end"] = _End(_statuses[0])


def _exchange(one: dict[str, ModuleType], other: dict[str, ModuleType]) -> None:
    """Swap the contents of two dicts without an access to their values: each written page would be
    copied.
    """
    held = [
        (ctypes.c_char * (dict.__basicsize__ - object.__basicsize__)).from_address(
            id(which) + object.__basicsize__
        )
        for which in (one, other)
    ]
    held[0].raw, held[1].raw = held[1].raw, held[0].raw


class _End:
    """The last object of the modules' teardown: it ends the process, and so frees the interpreter's
    remaining objects with their pages.
    """

    def __init__(self, status: int) -> None:
        self._exit = functools.partial(os._exit, status)

    def __del__(self) -> None:
        self._exit()


def _status_of(error: BaseException) -> int | None:
    """The exit status of a program that raises `error`; None if a signal ends it."""
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
