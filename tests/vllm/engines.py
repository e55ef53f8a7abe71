"""Real engines, each in a process of its own, and the means to drive several at once.

Waits are for answers and exits, never for time; `harness.PATIENCE_S` bounds every wait. A working
run comes nowhere near it, and it ends the wait of an engine that would never get its lease.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swapd.shared.config import Config
from swapd.shared.protocol import ComponentStatus
from tests.guarantees import harness
from tests.vllm.environment import environment

#: `harness.PATIENCE_S` as a multiple of the import of vLLM, and its minimum, in seconds.
PATIENCE_IMPORTS = 20
PATIENCE_LEAST_S = 150.0

#: A module for engines whose turns do not end early on a busy machine.
PATIENT = "tests.vllm.patient"

#: The characters of an engine's log that are shown when it fails.
TAIL_CHARS = 6000

WORKER = "swapd_client.vllm.cpu.CPUWorker"
PLAIN_WORKER = "tests.vllm.plain.PlainWorker"

MIB = 1 << 20
NOTHING: Mapping[str, object] = {}

#: Two prompts each, and the number of tokens of each answer.
REQUESTS = [[[5 + number, 6, 7, 8], [9, 10 + number]] for number in range(4)]
TOKENS = 8

#: The most rounds of requests in which a test must see its event.
ROUNDS = 12

#: Room for one engine, and for its loading; quanta as users have them.
TURNS: dict[str, object] = {
    "budget": "64MiB",
    "residency_factor": Config().residency_factor,
    "residency_bound": Config().residency_bound,
}


class EngineFailed(Exception):
    """A command raised in the engine: `kind` is the name of its exception's class."""

    def __init__(self, kind: str, message: str, log: str) -> None:
        super().__init__(f"{kind}: {message}\n--- its log ends\n{log}")
        self.kind = kind
        self.message = message


class EngineDied(Exception):
    """The engine's process ended before it answered."""


class Nursery:
    """Forks processes for engines that need not import vLLM first (`nursery.py`).

    The time of that import decides how long all waits of these tests may be. Tests run Python and
    arithmetic as well, so a machine that imports five times as slowly runs them as slowly.
    """

    def __init__(self, *imports: str, **variables: str) -> None:
        """Start it. Blocks until it has imported vLLM, and these modules."""
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.vllm.nursery", str(theirs.fileno()), *imports]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        began = time.monotonic()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=environment(**variables),
                pass_fds=[theirs.fileno()],
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._receive()
        import_s = time.monotonic() - began
        patience_s = max(PATIENCE_LEAST_S, PATIENCE_IMPORTS * import_s)
        harness.PATIENCE_S = max(harness.PATIENCE_S, patience_s)  # others may be slower
        self._door.settimeout(harness.PATIENCE_S)

    def fork(self, fds: Sequence[int], variables: Mapping[str, str]) -> int:
        """Fork a process of `engine.main` with these stdin, stdout and stderr; returns its pid."""
        socket.send_fds(self._door, [json.dumps(variables).encode()], list(fds))
        return int(self._receive())

    def _receive(self) -> bytes:
        said = self._door.recv(64)
        if not said:
            self._log.seek(0)
            raise EngineDied(f"the nursery died:\n{self._log.read().decode(errors='replace')}")
        return said

    def call(self, function: str, *arguments: object) -> Any:
        """The result of `module:function` in a process of its own. Raises: EngineFailed."""
        with tempfile.NamedTemporaryFile(prefix="swapd-", suffix=".log") as log:
            engine = Engine(function, Path(log.name), self)
            try:
                return engine.run(function, *arguments)
            finally:
                engine.close()

    def close(self) -> None:
        self._door.close()
        self._process.wait(harness.PATIENCE_S)
        self._log.close()


class Engine:
    """A process of `engine.py`: `engine.generate(prompts, 8)` has it call its method `generate`.

    `begin` does not wait for the answer, which `result` then returns.
    """

    def __init__(
        self, label: str, log: Path, nursery: Nursery | None = None, **variables: str
    ) -> None:
        """Start the process: a fork of `nursery`, or a new one."""
        self.label = label
        self._log = log
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        fds = (commands, answers, stderr)
        env = environment(**variables)
        self._process: subprocess.Popen[bytes] | None = None
        if nursery is not None:
            self.pid = nursery.fork(fds, env)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine"],
                env=env,
                stdin=commands,
                stdout=answers,
                stderr=stderr,
                start_new_session=True,  # `kill` ends its children with it
            )
            self.pid = self._process.pid
        for fd in fds:
            os.close(fd)
        self._exit = os.pidfd_open(self.pid)
        self._pending: list[str] = []
        self._read = b""

    def __repr__(self) -> str:
        return f"<Engine {self.label} {self.pid}>"

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)

        def call(*args: object, **options: object) -> Any:
            self.begin(command, *args, **options)
            return self.result()

        return call

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def begin(self, command: str, *args: object, **options: object) -> None:
        """Queue `command` after those queued before."""
        line = json.dumps({"do": command, "args": args, "options": options}) + "\n"
        self._pending.append(f"{command}{args}")
        with suppress(BrokenPipeError):  # `result` raises then
            os.write(self._commands, line.encode())

    def has_answered(self) -> bool:
        """Whether `result` would not block."""
        return b"\n" in self._read or bool(select.select([self._answers], [], [], 0)[0])

    def result(self) -> Any:
        """Return the result of the first command whose answer was not read yet. Blocks.

        Raises: EngineFailed, EngineDied.
        """
        what = self._pending.pop(0)
        line = self._line(what)
        if not line:
            raise EngineDied(f"{self} died in {what}; its log ends\n{self.log[-TAIL_CHARS:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"], answer["message"], self.log[-TAIL_CHARS:])
        return answer["ok"]

    def _line(self, what: str) -> bytes:
        while b"\n" not in self._read:
            if not select.select([self._answers], [], [], harness.PATIENCE_S)[0]:
                self.kill()
                raise AssertionError(
                    f"{self} never ended {what}; its log ends\n{self.log[-TAIL_CHARS:]}"
                )
            more = os.read(self._answers, 1 << 16)
            if not more:
                return b""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def kill(self) -> None:
        """SIGKILL to it and all its children; returns when it is dead."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert select.select([self._exit], [], [], harness.PATIENCE_S)[0], f"{self} does not die"
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """End everything of it. A second call does nothing."""
        if self._exit < 0:
            return
        self.kill()
        for fd in (self._commands, self._answers, self._exit):
            os.close(fd)
        self._exit = -1


def plain(model: Path, **more: object) -> dict[str, object]:
    """Arguments of an engine without swapd, with the same kernels as one with it."""
    return {
        "model": str(model),
        "worker_cls": PLAIN_WORKER,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 64 * MIB,
        "disable_log_stats": True,
        **more,
    }


def on_swapd(
    model: Path, endpoint: Path, settings: Mapping[str, object] = NOTHING, **more: object
) -> dict[str, object]:
    """Arguments of an engine on the daemon of `endpoint`, its component named like its model.

    `settings` are those of the plugin, as in a stage's YAML.
    """
    swapd = {"component": model.name, "endpoint": str(endpoint), **settings}
    return plain(model, **{"worker_cls": WORKER, "additional_config": {"swapd": swapd}, **more})


def rounds_until(seen: Callable[[], bool], what: str) -> Iterator[int]:
    """Serve in the body of the loop, once or more often, until `seen()`.

    When and where turns end depends on how fast the machine runs each engine: one of two may finish
    before the other begins. The body compares the answers of every round.
    Yields 1, 2 and so on. A body that serves that many times makes each round longer than the one
    before, and so longer than any quantum.
    Raises: AssertionError, if `ROUNDS` rounds did not show `what`.
    """
    for number in range(1, ROUNDS + 1):
        yield number
        if seen():
            return
    raise AssertionError(f"{ROUNDS} rounds of requests, and never was it seen that {what}")


def await_leases_back(daemon: harness.Daemon) -> None:
    """Wait for all releases: that of an ending thread uses its own channel, and may be late."""
    while any(component.leases for component in daemon.status().components):
        daemon.await_record("Release")


def await_components(daemon: harness.Daemon, *names: str) -> None:
    """Wait until these are all components: the daemon may notice the end of a process late."""
    while by_component(daemon).keys() != set(names):
        daemon.await_record("SessionGone")


def await_off(daemon: harness.Daemon, stage: str) -> None:
    """Wait until nothing of this stage is on the device: eviction has begun, and is soon over."""
    while any(
        one.name.startswith(stage) and one.state != "absent" for one in daemon.status().components
    ):
        daemon.await_record("Evicted")


def await_registered(daemon: harness.Daemon, *names: str) -> None:
    """Until these are the daemon's, filled; a record from before we listened is not missed.

    By their commit they are not: a daemon seals the host copies before.
    """
    while not registered(daemon) >= {*names}:
        daemon.await_record("HostCopySealed")


def registered(daemon: harness.Daemon) -> set[str]:
    """The filled components: a family counts if all its parts are filled."""
    found = by_component(daemon).items()
    return {name for name, parts in found if all(one.state != "filling" for one in parts)}


def by_component(daemon: harness.Daemon) -> dict[str, list[ComponentStatus]]:
    """The components by name: the parts of a family are under its name."""
    found: dict[str, list[ComponentStatus]] = {}
    for one in daemon.status().components:
        found.setdefault(one.part_of or one.name, []).append(one)
    return found


class Scene:
    """The daemons and engines of one test, and their logs, in one folder."""

    def __init__(self, folder: Path, models: Path, nursery: Nursery | None) -> None:
        self.folder = folder
        self.models = models
        self._nursery = nursery
        self._engines: list[Engine] = []
        self._daemons: list[harness.Daemon] = []

    def daemon(self, **settings: object) -> harness.Daemon:
        """A strict daemon that keeps turns as it does for users."""
        number = len(self._daemons)
        log = self.folder / f"swapd-{number}.log"
        patient = {"ack_timeout": harness.PATIENCE_S}  # slow machines: no early fence
        made = harness.Daemon(self.folder / f"d{number}", log, **{**TURNS, **patient, **settings})
        self._daemons.append(made)
        return made

    def daemon_again(self, last: harness.Daemon, **settings: object) -> harness.Daemon:
        """Start one in the folder of `last`, which has been killed."""
        log = self.folder / f"swapd-{len(self._daemons)}.log"
        patient = {"ack_timeout": harness.PATIENCE_S}
        made = harness.Daemon(last.folder, log, **{**TURNS, **patient, **settings})
        self._daemons.append(made)
        return made

    def process(self, label: str, *, multiprocessing: bool = False, **variables: str) -> Engine:
        """A process for an engine.

        With `multiprocessing`, the engine's core gets a process of its own, as a server's does.
        """
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocessing))
        log = self.folder / f"{label}-{len(self._engines)}.log"
        engine = Engine(label, log, self._nursery, **variables)
        self._engines.append(engine)
        return engine

    def start(
        self,
        *arguments: Mapping[str, object],
        imports: str = "",
        **options: Any,
    ) -> list[Engine]:
        """Start an engine for each set of arguments, all at once; returns when all are ready.

        `imports`: a module that changes vLLM, for the engine and the processes that it starts.
        A process for a core or a rank is forked from the engine's; `servers.py` has spawned ones.
        """
        apart = bool(imports) or options.get("multiprocessing")
        ranks = ("tensor_parallel_size", "pipeline_parallel_size")
        apart = apart or any(one.get(key, 1) != 1 for one in arguments for key in ranks)
        engines = [self.process(Path(str(one["model"])).name, **options) for one in arguments]
        for engine in engines:
            if imports:
                engine.imports(imports)
            if apart:
                engine.fork_workers()
        for engine, one in zip(engines, arguments, strict=True):
            engine.begin("start", **one)
        for engine in engines:
            engine.result()
        return engines

    def plain(self, *names: str, **options: Any) -> list[Engine]:
        """Engines without swapd, ready."""
        return self.start(*(plain(self.models / name) for name in names), **options)

    def on_swapd(self, daemon: harness.Daemon, *names: str, **options: Any) -> list[Engine]:
        """Engines on one daemon, ready."""
        return self.start(
            *(on_swapd(self.models / name, daemon.folder) for name in names), **options
        )

    def close(self) -> None:
        """End all, and check that all daemons worked to the end."""
        for engine in self._engines:
            engine.close()
        for daemon in self._daemons:
            daemon.close()

    def discard(self) -> None:
        for engine in self._engines:
            engine.close()
        for daemon in self._daemons:
            daemon.discard()


@contextmanager
def scene(models: Path, nursery: Nursery | None = None) -> Iterator[Scene]:
    """Without a nursery, each engine's process is a new one, as for users."""
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))  # short: sockets are in it
    made = Scene(folder, models, nursery)
    try:
        yield made
        made.close()
    finally:
        made.discard()
        shutil.rmtree(folder, ignore_errors=True)
