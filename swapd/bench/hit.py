"""Acquire and release of a resident component, against two bare round trips.

The thread holds another lease of the component, so this one is not kept and each use sends
messages. `decode` measures a kept lease, which sends none: the time that swapd adds to a loop that
acquires, works for a fixed time and releases.

The bare side is ZeroMQ alone, with the same messages, encoded and decoded by msgspec: a DEALER in
this process and a ROUTER under zmq.asyncio and uvloop in another.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import zmq

import swapd_client
from swapd import spawn
from swapd.bench.swap_in import peer
from swapd.shared import protocol

BLOCKS = 40
CALLS = 50
WARM_UP = 5
NAME = "small"


class Hit(msgspec.Struct, frozen=True):
    """Seconds are medians."""

    ratio: float
    hit_s: float
    two_round_trips_s: float


def measure(device: str = "host", blocks: int = BLOCKS) -> Hit:
    hits, bare = [], []
    with (
        spawn.daemon(device=device, budget="64MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
        _bare() as two_round_trips,
    ):
        client.register(NAME, {"weights": bytearray(1 << 20)})
        with client.acquire(NAME):
            for _ in range(blocks + WARM_UP):
                bare.append(two_round_trips())
                hits.append(_hit(client))
    hit_s = statistics.median(hits[WARM_UP:])
    bare_s = statistics.median(bare[WARM_UP:])
    return Hit(hit_s / bare_s, hit_s, bare_s)


def _hit(client: swapd_client.Client) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        client.acquire(NAME).release()
    return (time.perf_counter() - started) / CALLS


@contextmanager
def _bare() -> Iterator[Callable[[], float]]:
    endpoint = f"ipc://@swapd-bench-{os.getpid()}"  # no file, whose path may be too long
    with peer(_echo_main, endpoint) as pipe, zmq.Context() as context:
        pipe.recv_bytes()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(endpoint)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            yield partial(_two_round_trips, socket, poller)


def _two_round_trips(socket: "zmq.Socket[bytes]", poller: zmq.Poller) -> float:
    requests = protocol.Acquire(1, (NAME,)), protocol.Release(2, 1)
    started = time.perf_counter()
    for _ in range(CALLS):
        for request in requests:
            socket.send(protocol.encode(request))
            poller.poll()
            protocol.decode_reply(socket.recv())
    return (time.perf_counter() - started) / CALLS


def _echo_main(pipe: Connection, endpoint: str) -> None:
    import uvloop

    uvloop.run(_echo(pipe, endpoint))


async def _echo(pipe: Connection, endpoint: str) -> None:
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    pipe.send_bytes(b"ready")
    asyncio.get_running_loop().add_reader(pipe.fileno(), os._exit, 0)
    placements = (protocol.Placement(NAME, 1, ((0, 1),)),)
    while True:
        peer, payload = await socket.recv_multipart()
        request = protocol.decode_request(payload)
        reply = protocol.Granted(request.id, placements)
        socket.send_multipart([peer, protocol.encode(reply)])


STEP_S = 0.005
STEPS = 400
WARM_UP_STEPS = 20


class Decode(msgspec.Struct, frozen=True):
    """Medians. `share`: acquire and release as a share of a step."""

    share: float
    acquire_s: float
    release_s: float
    step_s: float


def decode(device: str = "host", steps: int = STEPS) -> Decode:
    acquires, releases = [], []
    with (
        spawn.daemon(device=device, budget="64MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        client.register("talker", {"weights": bytearray(1 << 20)})
        for _ in range(steps + WARM_UP_STEPS):
            started = time.perf_counter()
            lease = client.acquire("talker")
            acquired = time.perf_counter()
            while time.perf_counter() - acquired < STEP_S:
                pass
            stepped = time.perf_counter()
            lease.release()
            releases.append(time.perf_counter() - stepped)
            acquires.append(acquired - started)
    acquire_s = statistics.median(acquires[WARM_UP_STEPS:])
    release_s = statistics.median(releases[WARM_UP_STEPS:])
    share = (acquire_s + release_s) / STEP_S
    return Decode(share, acquire_s, release_s, STEP_S)
