"""A signal handler may acquire, ask and close at any place of the call that it interrupts."""

import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import Client, ClientClosed, Lease, UnknownComponent
from swapd_client.leases.cache import Cache
from swapd_client.session.life import Files
from tests.interrupts import Place, interrupt, interrupts, places

#: Places of one call, beside those where it has a lock, or reads an answer.
MOST = 20
LOCKED = ("mapping.py", "cache.py", "leases.py", "record.py", "channel.py")
SIZE = 5000


@pytest.fixture(scope="module", params=["strict", "relaxed"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB", isolation=request.param) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client, interrupts():
        yield client


def registered(client: Client) -> dict[str, torch.Tensor]:
    tensors = {name: torch.ones(SIZE) for name in ("clean", "mutable")}
    for name, tensor in tensors.items():
        client.register(name, {"w": tensor}, mutable=name == "mutable")
    return tensors


def hold(client: Client, tensors: dict[str, torch.Tensor]) -> None:
    with client.acquire(*tensors, timeout=30):
        assert all(tensor.sum() == SIZE for tensor in tensors.values())


def chosen(call: Callable[[], object]) -> list[Place]:
    once = {place[:2]: place for place in places(call, 10**6)}
    at_locks = [p for p in once.values() if p.code.co_filename.endswith(LOCKED)]
    return [*at_locks, *(p for p in once.values() if p not in at_locks)][: len(at_locks) + MOST]


def handled(call: Callable[[], object], place: Place, handler: Callable[[], object]) -> None:
    """Call; `handler()` runs in a signal handler at this place."""

    def handle(*_: object) -> None:
        sys.settrace(None)
        handler()

    signal.signal(signal.SIGINT, handle)
    interrupt(call, place)


def test_it_may_hold_what_the_interrupted_call_holds(client: Client) -> None:
    tensors = registered(client)
    call = partial(hold, client, tensors)
    for _ in range(2):
        call()
    for place in chosen(call):
        handled(call, place, call)
        call()


def test_what_it_holds_stays_while_the_interrupted_call_gives_it_back(client: Client) -> None:
    tensors = registered(client)
    call = partial(hold, client, tensors)
    for _ in range(2):
        call()
    leases: list[Lease] = []
    for place in chosen(call):
        handled(call, place, lambda: leases.append(client.acquire(*tensors, timeout=30)))
        for lease in leases:
            assert all(tensor.sum() == SIZE for tensor in tensors.values())
            lease.release()
        leases.clear()


def test_its_question_takes_no_answer_of_the_interrupted_call(client: Client) -> None:
    client.status()
    for place in chosen(client.status):
        handled(client.status, place, partial(client.status, timeout=30))


def close_while_the_lifeline_waits(client: Client) -> None:
    """Close while the lifeline's thread gives back leases, for which it needs the cache's lock, or
    adds files, for which it needs theirs."""
    lifeline = client.session.lifeline
    assert lifeline._thread is not None
    if client.session.error is None:
        lifeline.ring()
        while select.select([lifeline._bell.fileno()], [], [], 0)[0]:
            at = sys._current_frames().get(lifeline._thread.ident or 0)
            if at is not None and at.f_code in (Cache.each.__code__, Files.add.__code__):
                break  # it waits since before the bell, which it will not read
    client.close()


@pytest.mark.parametrize("does", ["acquires", "acquires for the first time", "closes"])
def test_it_may_close_a_client_that_acquires_or_closes(daemon: Spawned, does: str) -> None:
    def made() -> tuple[Client, dict[str, torch.Tensor], Callable[[], None]]:
        client = swapd_client.connect(daemon.folder)
        tensors = registered(client)
        for _ in range(0 if does == "acquires for the first time" else 3):
            hold(client, tensors)
            client.acquire("clean").release()

        def acquire() -> None:  # and read nothing: a thread may close it meanwhile
            client.acquire(*tensors).release()

        return client, tensors, client.close if does == "closes" else acquire

    with interrupts():
        found = chosen(made()[2])
        for place in found:
            client, tensors, call = made()
            with suppress(ClientClosed, UnknownComponent):  # it may be going away meanwhile
                handled(call, place, partial(close_while_the_lifeline_waits, client))
            client.close()
            assert not client.session.components
            assert all(tensor.sum() == SIZE for tensor in tensors.values())
            for tensor in tensors.values():
                tensor.fill_(2.0)


def test_a_close_in_a_thread_without_calls_waits_for_the_one_that_a_handler_began(
    daemon: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = swapd_client.connect(daemon.folder)
    with client.leasing.cache.lock:  # as a call has it that a handler interrupts
        client.close()
    closer = client._closer
    assert closer is not None
    waited = threading.Event()
    monkeypatch.setattr(closer, "is_alive", lambda: True)
    monkeypatch.setattr(closer, "join", waited.set)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(client.close).result()
    assert waited.is_set()
    threading.Thread.join(closer)
