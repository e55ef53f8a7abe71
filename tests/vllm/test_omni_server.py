"""Whole servers, `vllm-omni serve`, on one swapd with room for one of three stages, strict.

The answers are those of plain vllm-omni, text and sound, byte for byte.
"""

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm import engines
from tests.vllm.engines import (
    Nursery,
    Scene,
    await_leases_back,
    await_registered,
    by_component,
    rounds_until,
)
from tests.vllm.omni_server import serving
from tests.vllm.omni_server.serving import MODELS, STAGES, Answer, Starts, ask, draw
from tests.vllm.servers import Server
from tests.vllm.swaps import whole

PROMPTS = ("hello there", "what do you hear?", "a boat at sea")

#: Room for the largest stage; no two fit.
SETTINGS = {"budget": "112MiB", "keep_host": "512MiB"}

#: So many tokens of text that a client leaves, or the thinker is killed, long before the last.
LONG = 1000


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    """Forks servers that have imported vllm-omni."""
    made = Nursery(serving.IMPORTED)
    yield made
    made.close()


@pytest.fixture(scope="module")
def checkpoints(nursery: Nursery) -> Iterator[Path]:
    """A folder of them, 0.5 GB: pytest would keep it."""
    with tempfile.TemporaryDirectory(prefix="swapd-") as folder:
        nursery.call("tests.vllm.omni_server.checkpoints:write_all", folder)
        yield Path(folder)


class Place:
    """A daemon, and the server of one model on it; after a test has killed it, another."""

    def __init__(self, scene: Scene, starts: Starts, name: str) -> None:
        self.daemon = scene.daemon(**SETTINGS)
        self.starts = starts
        self._scene = scene
        self.name = name
        self._server = starts.omni(name, self.daemon)

    def server(self) -> Server:
        """The server, ready."""
        if self._server.ended:
            self._server = self.starts.omni(self.name, self.daemon)
        return self._server.ready()

    def restart_daemon(self) -> None:
        """SIGKILL to it; then start another in its folder."""
        self.daemon.kill()
        self.daemon = self._scene.daemon_again(self.daemon, **SETTINGS)

    def evictions(self) -> list[str]:
        """The components of all evictions by now, in order."""
        return [whole(one.name) for one in self.daemon.watch.seen("Evict")]

    def check_copied_out(self) -> None:
        """Nothing but the KV caches of requests that waited for another stage's turn."""
        out = {one.name for one in self.daemon.watch.seen("Evicted") if one.bytes_back}
        assert out <= {f"{name}.kv" for name in STAGES}


@pytest.fixture(scope="module", params=MODELS)
def place(
    request: pytest.FixtureRequest, checkpoints: Path, nursery: Nursery, forks: Nursery
) -> Iterator[Place]:
    with engines.scene(checkpoints, nursery) as scene, ExitStack() as servers:
        servers.callback(serving.remove_shared_memory)
        yield Place(scene, Starts(scene, forks, servers), request.param)


class Plain(NamedTuple):
    answers: dict[str, Answer]
    death: "Death"


class Death(NamedTuple):
    """The status codes that clients get when the thinker is killed: for the request that it
    answers, for the next one, and of /health. The words depend on the moment.
    """

    under_way: int
    then: int
    health: int


@pytest.fixture(scope="module")
def plain(place: Place) -> Plain:
    """Of plain vllm-omni. It starts while the server of `place` does."""
    server = place.starts.omni(place.name).ready()
    answers = {prompt: ask(server, prompt) for prompt in PROMPTS}
    assert len({*answers.values()}) == len(PROMPTS)
    said = Plain(answers, death_of(server))
    server.close()
    return said


def death_of(server: Server) -> Death:
    asked = serving.chat(PROMPTS[0], stream=True, max_tokens=LONG)
    with server.lines(serving.CHAT, **asked) as lines:
        next(lines)
        os.kill(server.pid_of(serving.THINKER), signal.SIGKILL)
        (error,) = [json.loads(line[len("data: ") :]) for line in lines if '"error"' in line]
    then = server.status_of(serving.CHAT, **serving.chat(PROMPTS[0]))
    return Death(error["error"]["code"], then, server.status_of("/health"))


def test_it_answers_as_plain_vllm_omni_does_while_each_stage_evicts_the_others(
    place: Place, plain: Plain
) -> None:
    server = place.server()
    before = len(place.evictions())
    with ThreadPoolExecutor(2) as clients:
        for _ in rounds_until(
            lambda: {*STAGES} <= {*place.evictions()[before:]}, "each stage was evicted"
        ):
            said = clients.map(lambda prompt: ask(server, prompt), PROMPTS)
            assert dict(zip(PROMPTS, said, strict=True)) == plain.answers
    await_leases_back(place.daemon)
    place.check_copied_out()
    status = place.daemon.status()
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)


@pytest.mark.parametrize("place", ["qwen3_omni_moe"], indirect=True)
def test_clients_that_leave_in_the_middle_leave_no_lease(place: Place, plain: Plain) -> None:
    server = place.server()
    # before the text, in it, and between text and sound
    for read, tokens in ((0, LONG), (2, LONG), (serving.TOKENS, serving.TOKENS)):
        asked = serving.chat(PROMPTS[0], stream=True, max_tokens=tokens)
        with server.lines(serving.CHAT, **asked) as lines:
            assert len(list(islice(filter(None, lines), read))) == read
        assert ask(server, PROMPTS[1]) == plain.answers[PROMPTS[1]]
    await_leases_back(place.daemon)


@pytest.mark.parametrize("place", ["qwen3_omni_moe"], indirect=True)
def test_a_daemon_that_is_killed_and_started_again_under_load_costs_no_request(
    place: Place, plain: Plain
) -> None:
    server = place.server()
    before, killed = place.daemon.status().loads, threading.Event()

    def ask_until_killed(prompt: str) -> list[Answer]:
        got = [ask(server, prompt)]
        while not killed.is_set():
            got.append(ask(server, prompt))
        return got

    with ThreadPoolExecutor(2) as clients:
        said = {prompt: clients.submit(ask_until_killed, prompt) for prompt in PROMPTS[:2]}
        try:
            while place.daemon.status().loads < before + len(STAGES):
                place.daemon.await_record("CopyIn")
            place.restart_daemon()
        finally:
            killed.set()
        for prompt, got in said.items():
            assert {*got.result()} == {plain.answers[prompt]}
    await_registered(place.daemon, *STAGES)
    for _ in rounds_until(lambda: {*STAGES} <= {*place.evictions()}, "they take turns again"):
        for prompt in PROMPTS:
            assert ask(server, prompt) == plain.answers[prompt]
    place.check_copied_out()


@pytest.mark.parametrize("place", ["qwen2_5_omni"], indirect=True)
def test_a_server_of_pictures_takes_turns_with_the_stages(place: Place, plain: Plain) -> None:
    server = place.server()
    without = place.starts.image()
    pictures = place.starts.image(place.daemon).ready()
    drawn = {prompt: draw(without.ready(), prompt) for prompt in PROMPTS}
    without.close()
    before = len(place.evictions())
    both = {serving.DIT, "talker"}
    with ThreadPoolExecutor(2) as clients:
        for _ in rounds_until(lambda: both <= {*place.evictions()[before:]}, "both were evicted"):
            said = clients.map(lambda prompt: ask(server, prompt), PROMPTS)
            seen = clients.map(lambda prompt: draw(pictures, prompt), PROMPTS)
            assert dict(zip(PROMPTS, said, strict=True)) == plain.answers
            assert dict(zip(PROMPTS, seen, strict=True)) == drawn
    # by the server's own --enable-cpu-offload
    assert place.daemon.component(serving.DIT).policy == "alternating"
    pictures.close()
    await_leases_back(place.daemon)
    place.check_copied_out()


def test_sigkill_of_a_busy_stage_is_as_in_plain_vllm_omni_and_leaves_nothing_in_the_daemon(
    place: Place, plain: Plain
) -> None:
    server = place.server()
    assert ask(server, PROMPTS[0]) == plain.answers[PROMPTS[0]]
    assert death_of(server) == plain.death
    opened = place.daemon.watch.seen("SessionOpened")
    sessions = [one.session for one in opened if one.label.startswith("thinker:")]
    place.daemon.watch.until_gone(sessions[-1])
    assert not {"thinker", "thinker.kv"} & by_component(place.daemon).keys()
    assert place.daemon.status().quarantined_bytes == 0
    await_leases_back(place.daemon)
    server.close()


@pytest.mark.parametrize("place", ["qwen3_omni_moe"], indirect=True)
def test_a_thinker_that_starts_again_reads_no_weight(place: Place, plain: Plain) -> None:
    place.server().close()
    server = place.server()
    assert {prompt: ask(server, prompt) for prompt in PROMPTS} == plain.answers
    assert "thinker reads no weights" in server.log
    assert "code2wav reads no weights" not in server.log, "it computes tables from them"
