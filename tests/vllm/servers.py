"""Real servers, `vllm serve`, each a tree of processes of its own: API server, core, worker.

A server listens on a unix socket, so that no two ever want the same port. All that its processes
print goes into one pipe: the server is up when it says so there, and its processes are gone when
the pipe ends. Waits are for that and for answers; every wait is bounded.

$TESTS_VLLM_DRIVES names `Forked` for those that the nursery forks; they need not import anything.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

import httpx

from tests.guarantees import harness
from tests.vllm.engine import DRIVES
from tests.vllm.engines import MIB, TAIL_CHARS, WORKER, Nursery
from tests.vllm.environment import environment
from tests.vllm.models import MODELS, VOCABULARY

VLLM = Path(sys.executable).with_name("vllm")

UP = "Application startup complete"


class Forked:
    """Driven as an engine is: the command line of vLLM, in a process that has imported it."""

    main = "vllm.entrypoints.cli.main:main"

    def run(self, *arguments: str) -> None:
        """Blocks until the server ends."""
        import multiprocessing

        # vLLM's processes are forked too, although its command line says spawn. A signal that a
        # child gets is its own: it must not wake the event loop of its parent
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        sys.argv = ["vllm", *arguments]
        resolve_name(self.main)()


class Server:
    """One server. Made by `Servers.start`; ask it when it is `ready`."""

    def __init__(self, name: str, path: Path, output: int) -> None:
        """`path`: of its socket. `output`: a pipe's end, to which all its processes write; owned
        from now on."""
        self.name = name
        self._path = path
        self.pid = 0
        #: If this process is its parent.
        self.process: subprocess.Popen[bytes] | None = None
        self._log: list[str] = []
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, args=[output], daemon=True)
        self._reader.start()
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)),
            base_url=f"http://{name}",
            timeout=harness.PATIENCE_S,
        )

    def __repr__(self) -> str:
        return f"<Server {self.name} {self.pid}>"

    def _read(self, output: int) -> None:
        with open(output, errors="replace") as lines:
            for line in lines:
                self._log.append(line)
                if UP in line:
                    self._up.set()
        self._up.set()

    @property
    def log(self) -> str:
        return "".join(self._log)

    @property
    def tail(self) -> str:
        return f"the log of {self} ends\n{self.log[-TAIL_CHARS:]}"

    def ready(self) -> Self:
        """Blocks until it serves: its processes import vLLM one after the other."""
        assert self._up.wait(2 * harness.PATIENCE_S), f"never came up; {self.tail}"
        assert UP in self.log, f"ended at once; {self.tail}"
        while not self._listens():  # the next that it does, and it does not say so
            self._reader.join(0.01)
            assert not self.ended, f"ended at once; {self.tail}"
        return self

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as knock:
            return knock.connect_ex(str(self._path)) == 0

    def pid_of(self, role: str) -> int:
        """The pid of its process of this role: `APIServer`, `EngineCore`, `Worker`."""
        found = re.search(rf"\({role} pid=(\d+)\)", self.log)
        assert found, f"no {role}; {self.tail}"
        return int(found[1])

    def await_end(self) -> None:
        """Wait until all its processes have ended."""
        self._reader.join(harness.PATIENCE_S)
        assert self.ended, f"never ended; {self.tail}"

    @property
    def ended(self) -> bool:
        return not self._reader.is_alive()

    def exit_status(self) -> int:
        """Once all its processes have ended; of one started as users do."""
        self.await_end()
        assert self.process is not None
        return self.process.wait(harness.PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL to all its processes; returns when they are dead."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(harness.PATIENCE_S)
        self.await_end()

    def close(self) -> None:
        """End everything of it. A second call does nothing."""
        self._http.close()
        if not self.ended:
            self.kill()

    # --- requests ------------------------------------------------------------------------

    def post(self, path: str, **body: object) -> Any:
        """The answer, in JSON. Raises: httpx.HTTPError."""
        said = self._http.post(path, json=self._body(body))
        assert said.status_code == 200, f"{said.status_code} {said.text}; {self.tail}"
        return said.json()

    def call(self, path: str, **query: str | int) -> None:
        """POST to one of vLLM's routes for its development."""
        said = self._http.post(path, params=query)
        assert said.status_code == 200, f"{said.status_code} {said.text}; {self.tail}"

    @property
    def is_sleeping(self) -> bool:
        return bool(self._http.get("/is_sleeping").json()["is_sleeping"])

    def complete(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The tokens that follow the prompt."""
        said = self.post("/v1/completions", prompt=prompt, max_tokens=tokens)
        (choice,) = said["choices"]
        return list(choice["token_ids"])

    @contextmanager
    def stream(self, prompt: Sequence[int], tokens: int) -> Iterator[Iterator[int]]:
        """As `complete`, token by token. Leaving it disconnects.

        Raises: httpx.HTTPError; Broken, if the server says that it cannot go on.
        """
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        with self.lines("/v1/completions", **body) as lines:
            yield _tokens(lines)

    @contextmanager
    def lines(self, path: str, **body: object) -> Iterator[Iterator[str]]:
        """The lines of an answer as they come. Leaving it disconnects. Raises: httpx.HTTPError."""
        with self._http.stream("POST", path, json=self._body(body)) as said:
            assert said.status_code == 200, f"{said.read()!r}; {self.tail}"
            yield said.iter_lines()

    def status_of(self, path: str, **body: object) -> int:
        """The status code of the answer to this body, or to a GET. Raises: httpx.HTTPError."""
        if not body:
            return int(self._http.get(path).status_code)
        return int(self._http.post(path, json=self._body(body)).status_code)

    def streamed(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """As `complete`, asked for as a stream."""
        with self.stream(prompt, tokens) as said:
            return list(said)

    def metric(self, name: str) -> float:
        """The sum over all that it reports under this name."""
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{name}{{"))

    def _body(self, body: Mapping[str, object]) -> dict[str, object]:
        same = {"model": self.name, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**same, **body}


class Broken(Exception):
    """A server ended a stream with an error."""


def _tokens(lines: Iterator[str]) -> Iterator[int]:
    for line in lines:
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        said = json.loads(data)
        if "error" in said:
            raise Broken(said["error"])
        for choice in said["choices"]:
            yield from choice["token_ids"] or []


def command(folder: Path, path: Path) -> list[str]:
    """`vllm serve` of the thinker in `folder`, at the socket `path`, as a user types it."""
    return [
        *(str(VLLM), "serve", str(folder / "thinker"), "--enforce-eager", "--dtype", "bfloat16"),
        *("--served-model-name", "thinker", "--uds", str(path)),
        *("--max-model-len", "256", "--max-num-seqs", "1"),
        *("--kv-cache-memory-bytes", str(64 * MIB)),
    ]


def of_its_own(folder: Path) -> dict[str, str]:
    """The environment of a `swapd run` whose runtime and state folders are in `folder`."""
    (runtime := folder / "r").mkdir(mode=0o700)
    return environment(XDG_RUNTIME_DIR=str(runtime), XDG_STATE_HOME=str(folder))


def under_swapd(folder: Path, path: Path, *arguments: str | Path) -> closing[Server]:
    """The server at the socket `path` that `swapd run` with these arguments starts."""
    command = [sys.executable, "-m", "swapd", "run", *arguments]
    return closing(spawned("thinker", path, command, of_its_own(folder)))


def spawned(
    name: str, path: Path, command: Sequence[str | Path], variables: Mapping[str, str]
) -> Server:
    """The server at the socket `path` that this command starts. Does not wait for it."""
    ours, theirs = os.pipe()
    server = Server(name, path, ours)
    try:
        server.process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        server.pid = server.process.pid
    finally:
        os.close(theirs)
    return server


def forked(
    nursery: Nursery,
    name: str,
    path: Path,
    arguments: Sequence[str],
    drives: type[Forked] = Forked,
    **more: str,
) -> Server:
    """A server at the socket `path`, of a process that the nursery forks. Does not wait for it."""
    variables = environment(**{DRIVES: f"{drives.__module__}:{drives.__name__}"}, **more)
    command = json.dumps({"do": "run", "args": arguments, "options": {}})
    (ours, theirs), (commands, its) = os.pipe(), os.pipe()
    server = Server(name, path, ours)
    try:
        os.write(its, command.encode())
        server.pid = nursery.fork((commands, theirs, theirs), variables)
    finally:
        for fd in (its, commands, theirs):  # it ends with this command
            os.close(fd)
    return server


class Servers:
    """Starts servers of the models in one folder, on one daemon; ends them all at its end."""

    def __init__(self, folder: Path, models: Path, endpoint: Path, nursery: Nursery) -> None:
        """`folder`: for sockets, so of a short path. `models`: as `write` left them."""
        self._folder = folder
        self._models = models
        self._endpoint = endpoint
        self._nursery = nursery
        self._started = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, name: str, *flags: str, as_users_do: bool = False) -> Server:
        """A server of the model `name`; its component is called so. Does not wait for it.

        It is forked by the nursery, ready in seconds; or, `as_users_do`, it is `vllm serve` in a
        shell, with its processes spawned.
        """
        self._started += 1
        path = self._folder / f"{name}{self._started}.sock"
        arguments = [*self._arguments(name, path), *flags]
        if as_users_do:
            server = spawned(name, path, [VLLM, *arguments], environment())
        else:  # with vLLM's routes for sleep
            server = forked(self._nursery, name, path, arguments, VLLM_SERVER_DEV_MODE="1")
        return self._open.enter_context(closing(server))

    def _arguments(self, name: str, path: Path) -> list[str]:
        swapd = {"component": name, "endpoint": str(self._endpoint)}
        return [
            "serve",
            str(self._models / name),
            "--enforce-eager",
            *("--served-model-name", name),
            *("--uds", str(path)),
            *("--worker-cls", WORKER),
            *("--additional-config", json.dumps({"swapd": swapd})),
            *("--max-model-len", "256"),
            *("--max-num-seqs", "1"),  # in a batch, sums depend on other requests
            *("--dtype", "bfloat16"),
            *("--kv-cache-memory-bytes", str(64 * MIB)),
        ]


# --- checkpoints -------------------------------------------------------------------------


def write(folder: Path, models: Path) -> None:
    """Write the checkpoints of `models`, each with a tokenizer for answers in text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    config = {
        "tokenizer_class": "TokenizersBackend",
        "unk_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
    }
    for name in MODELS:
        made = folder / name
        made.mkdir(parents=True)
        for file in (models / name).iterdir():
            (made / file.name).symlink_to(file)
        tokenizer.save(str(made / "tokenizer.json"))
        (made / "tokenizer_config.json").write_text(json.dumps(config))
