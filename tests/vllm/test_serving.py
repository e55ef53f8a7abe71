"""Two real servers, `vllm serve`, on one swapd with room for one, strictly isolated.

Clients ask both at once, by streams too; they leave in the middle; servers are stopped and killed
while they answer. The answers are plain vLLM's.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import engines, servers
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    await_leases_back,
    await_off,
    await_registered,
    rounds_until,
)
from tests.vllm.servers import Broken, Server, Servers

#: The tokens that follow each prompt, by model.
Answers = Mapping[str, list[list[int]]]

PROMPTS = [prompt for prompts in REQUESTS for prompt in prompts]

#: So many tokens that a client leaves, or a server is killed, long before the last.
LONG = 200
#: How many a server has made.
MADE = "vllm:generation_tokens_total"


class Place:
    """A daemon, and a server for each of two models; one that a test has ended is started anew."""

    def __init__(self, scene: engines.Scene, servers: Servers, daemon: Daemon) -> None:
        self.daemon = daemon
        self._scene = scene
        self._servers = servers
        # one as users start theirs
        self._now = {
            "thinker": servers.start("thinker", as_users_do=True),
            "talker": servers.start("talker"),
        }

    def both(self) -> list[Server]:
        """Thinker and talker, ready."""
        for name, server in self._now.items():
            if server.ended:
                self._now[name] = self._servers.start(name)
        return [server.ready() for server in self._now.values()]

    def restart_daemon(self) -> None:
        """SIGKILL to it; then start another in its folder."""
        self.daemon.kill()
        self.daemon = self._scene.daemon_again(self.daemon)

    def await_gone(self, server: Server) -> None:
        """Wait until the daemon knows that the server's worker has ended, and has nothing of it."""
        opened = self.daemon.watch.seen("SessionOpened")
        sessions = [one.session for one in opened if one.label.startswith(f"{server.name}:")]
        self.daemon.watch.until_gone(sessions[-1])
        assert server.name not in engines.by_component(self.daemon)
        assert self.daemon.status().quarantined_bytes == 0


@pytest.fixture(scope="module")
def place(
    models: Path, nursery: engines.Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("served")
    servers.write(folder, models)
    with engines.scene(models, nursery) as made:
        daemon = made.daemon()
        with Servers(made.folder, folder, daemon.folder, nursery) as started:
            yield Place(made, started, daemon)


@pytest.fixture(scope="module")
def answers(models: Path, nursery: engines.Nursery) -> Answers:
    """The answers of plain vLLM, each prompt alone."""
    with engines.scene(models, nursery) as made:
        return {
            engine.label: [engine.generate([prompt], TOKENS)[0] for prompt in PROMPTS]
            for engine in made.plain("thinker", "talker")
        }


def ways(server: Server) -> list[Callable[[list[int], int], list[int]]]:
    """The ways to send it a request."""
    return [server.complete, server.streamed]


def test_both_answer_as_plain_vllm_does_plainly_and_in_streams(
    place: Place, answers: Answers
) -> None:
    both = place.both()
    before = place.daemon.status().evictions

    def ask(server: Server) -> list[list[int]]:
        asked = ways(server)
        return [asked[n % len(asked)](prompt, TOKENS) for n, prompt in enumerate(PROMPTS)]

    with ThreadPoolExecutor() as clients:
        for server, said in zip(both, clients.map(ask, both), strict=True):
            assert said == answers[server.name]
    await_leases_back(place.daemon)
    status = place.daemon.status()
    assert status.evictions > before
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)


def test_of_many_requests_at_once_each_gets_its_own_answer(place: Place, answers: Answers) -> None:
    asked = [(server, n) for n in range(len(PROMPTS)) for server in place.both()]

    def ask(one: tuple[Server, int]) -> list[int]:
        server, number = one
        return ways(server)[number % 2](PROMPTS[number], TOKENS)

    with ThreadPoolExecutor(len(asked)) as clients:
        for (server, number), said in zip(asked, clients.map(ask, asked), strict=True):
            assert said == answers[server.name][number]


def test_a_client_that_leaves_its_stream_leaves_no_lease(place: Place, answers: Answers) -> None:
    thinker, talker = place.both()
    made = [thinker.metric(MADE)]
    for _ in rounds_until(
        lambda: made[-1] - made[-2] < LONG, "a stream did not go on to its end without its client"
    ):
        with thinker.stream(PROMPTS[0], LONG) as tokens:
            assert list(islice(tokens, 3)) == answers["thinker"][0][:3]
        assert talker.complete(PROMPTS[0], TOKENS) == answers["talker"][0]
        assert thinker.complete(PROMPTS[1], TOKENS) == answers["thinker"][1]
        made.append(thinker.metric(MADE))
    await_leases_back(place.daemon)


def test_a_stream_is_the_same_when_the_other_has_its_turn_in_it(
    place: Place, answers: Answers
) -> None:
    thinker, talker = place.both()
    alone = thinker.streamed(PROMPTS[0], LONG)
    with thinker.stream(PROMPTS[0], LONG) as tokens, ThreadPoolExecutor() as clients:
        begun = list(islice(tokens, 3))
        said = clients.submit(talker.complete, PROMPTS[0], TOKENS)
        assert begun + list(tokens) == alone
        assert said.result() == answers["talker"][0]


def test_a_daemon_that_is_killed_or_upgraded_under_load_costs_no_request(
    place: Place, answers: Answers
) -> None:
    both = place.both()
    asked = [(server, n) for n in range(len(PROMPTS)) for server in both]
    before = place.daemon.status().loads
    killed = threading.Event()

    def ask(server: Server, number: int) -> list[list[int]]:
        """Once, and as long as the daemon is still to be killed."""
        got = [ways(server)[number % 2](PROMPTS[number], TOKENS)]
        while not killed.is_set():
            got.append(ways(server)[number % 2](PROMPTS[number], TOKENS))
        return got

    with ThreadPoolExecutor(len(asked)) as clients:
        said = [clients.submit(ask, *one) for one in asked]
        try:
            while place.daemon.status().loads < before + 2:  # both have begun
                place.daemon.await_record("CopyIn")
            place.restart_daemon()
            await_registered(place.daemon, *(server.name for server in both))
            place.daemon.upgrade()
        finally:
            killed.set()
        for (server, number), one in zip(asked, said, strict=True):
            assert all(got == answers[server.name][number] for got in one.result())
    await_registered(place.daemon, *(server.name for server in both))
    for server in (*both, *both):
        check_goes_on(server, answers)
    status = place.daemon.status()
    assert status.evictions > 0, "they take turns again"
    assert status.bytes_out == 0


@pytest.mark.parametrize("killed", [False, True], ids=["the daemon lives", "the daemon is killed"])
def test_a_server_that_is_put_to_sleep_leaves_the_device_and_answers_when_it_is_awake(
    place: Place, answers: Answers, *, killed: bool
) -> None:
    """Requests that come meanwhile wait; one that runs is aborted, which is vLLM's default."""
    thinker, talker = place.both()
    talker.call("/wake_up")  # it does not sleep
    with talker.stream(PROMPTS[0], LONG) as tokens:
        next(tokens)
        for _ in range(2):
            talker.call("/sleep", level=1)
        assert left(tokens) < LONG - 1
    assert talker.is_sleeping
    with ThreadPoolExecutor() as clients:
        said = clients.submit(talker.complete, PROMPTS[0], TOKENS)
        await_off(place.daemon, "talker")
        check_goes_on(thinker, answers)
        if killed:
            place.restart_daemon()
            await_registered(place.daemon, "thinker", "talker")
            check_goes_on(thinker, answers)
        await_off(place.daemon, "talker")
        assert talker.is_sleeping
        assert not said.done()
        talker.call("/wake_up", tags="weights")
        assert talker.is_sleeping
        talker.call("/wake_up", tags="kv_cache")
        assert not talker.is_sleeping
        assert said.result() == answers["talker"][0]
    assert "talker sleeps: others may have its memory" in talker.log
    for server in (thinker, talker):
        check_goes_on(server, answers)


def test_sigterm_in_a_stream_ends_a_server_and_leaves_nothing_in_the_daemon(
    place: Place, answers: Answers
) -> None:
    thinker, talker = place.both()
    with thinker.stream(PROMPTS[0], LONG) as tokens:
        next(tokens)
        os.kill(thinker.pid, signal.SIGTERM)
        place.await_gone(thinker)
        check_goes_on(talker, answers)
    # vLLM's API server waits for its clients to go
    assert thinker.exit_status() == 0


def test_sigkill_of_a_whole_server_costs_the_other_nothing_and_another_takes_its_name(
    place: Place, answers: Answers
) -> None:
    thinker, talker = place.both()
    with thinker.stream(PROMPTS[0], LONG) as tokens:
        next(tokens)
        thinker.kill()
        assert left(tokens) < LONG - 1
    place.await_gone(thinker)
    check_goes_on(talker, answers)
    for server in place.both():
        check_goes_on(server, answers)


def test_sigkill_of_a_core_ends_its_server_and_the_daemon_frees_what_it_held(
    place: Place, answers: Answers
) -> None:
    thinker, talker = place.both()
    with talker.stream(PROMPTS[0], LONG) as tokens:
        next(tokens)
        os.kill(talker.pid_of("EngineCore"), signal.SIGKILL)
        assert left(tokens) < LONG - 1
    place.await_gone(talker)
    check_goes_on(thinker, answers)
    talker.await_end()
    for server in place.both():
        check_goes_on(server, answers)


def left(tokens: Iterator[int]) -> int:
    """The number of tokens until the stream ends, or breaks off."""
    came = 0
    with suppress(httpx.HTTPError, Broken):
        for _ in tokens:
            came += 1
    return came


def check_goes_on(server: Server, answers: Answers) -> None:
    for ask in ways(server):
        assert ask(PROMPTS[2], TOKENS) == answers[server.name][2]
