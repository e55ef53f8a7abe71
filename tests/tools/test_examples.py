"""The programs of examples/ run unchanged, and print the promised output."""

import os
import re
import runpy
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn

from swapd import spawn

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Budget and output of each program. Programs with processes of their own run in one.
ALONE = {
    "asyncio_pipeline": ("192MiB", r"4 requests, \d+ evictions, 0 bytes copied back\n"),
    "checkpoints": (
        "96MiB",
        r"((base|code|math): came in within .* ms, answered .*\n){10}"
        r"\d+ loads of 10 acquires, 0 bytes copied back\n",
    ),
    "diffusers_pipeline": (
        "160MiB",
        r"transformer: 131 MiB\nvae: 143 MiB\nthe same picture\n"
        r"144 MiB of the device at most, \d loads, 0 bytes copied back\n",
    ),
}
WITH_OTHERS = {
    "replicas": (
        "96MiB",
        r"3 share 80 MiB of memory, 82 of the device\n(replica \d answers .*\n){3}",
    ),
    "two_processes": ("256MiB", r"(answer of 2048 numbers\n|\w+: \d evictions, 0 bytes .*\n){7}"),
}


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(program: Path) -> None:
    text = program.read_text()
    assert len(text.splitlines()) < 60
    assert f"    python examples/{program.name}" in text


@pytest.mark.parametrize("name", ALONE)
def test_an_example_does_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    budget, expected = ALONE[name]
    with spawn.daemon(budget=budget) as daemon:
        monkeypatch.setenv("SWAPD_ENDPOINT", str(daemon.folder))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capfd.readouterr().out
    assert re.fullmatch(expected, said), said


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_an_example_of_several_processes_does_what_it_says(name: str) -> None:
    budget, expected = WITH_OTHERS[name]
    with spawn.daemon(budget=budget) as daemon:
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py"],
            env={**os.environ, "SWAPD_ENDPOINT": str(daemon.folder)},  # noqa: TID251
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert re.fullmatch(expected, done.stdout), done.stdout


class Serving(uvicorn.Server):
    """A server in a thread; it says when it serves, and where."""

    up: "Future[int]"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set_result(self.servers[0].sockets[0].getsockname()[1])

    def ended(self, run: "Future[None]") -> None:
        if not self.up.done():
            self.up.set_exception(run.exception() or RuntimeError("it ended before it served"))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address at which `fastapi_service` answers."""
    with spawn.daemon(budget="128MiB") as daemon, ThreadPoolExecutor(1) as thread:
        monkeypatch.setenv("SWAPD_ENDPOINT", str(daemon.folder))
        made = runpy.run_path(str(EXAMPLES / "fastapi_service.py"))
        serving = Serving(uvicorn.Config(made["app"], port=0, log_level="warning"))
        serving.up = Future()
        thread.submit(serving.run).add_done_callback(serving.ended)
        yield f"http://127.0.0.1:{serving.up.result()}"
        serving.should_exit = True


def test_a_web_service_with_two_models_answers_eight_clients_at_once(service: str) -> None:
    def ask(number: int) -> tuple[str, bytes]:
        name = ("summarise", "translate")[number % 2]
        request = urllib.request.Request(f"{service}/{name}?n={number % 4}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return f"{name} {number % 4}", answer.read()

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, range(32)))
    assert len(set(answers)) == 4, "each question has one answer"
