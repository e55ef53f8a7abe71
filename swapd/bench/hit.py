"""Acquire and release of a resident component, against two bare round trips.

The thread holds another lease of the component, so this one is not kept and each use sends
messages. `decode` measures a kept lease, which sends none: the time that swapd adds to a loop that
acquires, works for a fixed time and releases.

The bare side is ZeroMQ alone, with the same messages, encoded and decoded by msgspec: a DEALER in
this process and a ROUTER under zmq.asyncio and uvloop in another.
"""

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import msgspec
import zmq

import swapd_client
from swapd import spawn
from swapd.shared import protocol

BLOCKS = 40
CALLS = 50
WARM_UP = 5
NAME = "small"


class Hit(msgspec.Struct, frozen=True):
    """Seconds are medians over `blocks`."""

    ratio: float
    hit_s: float
    two_round_trips_s: float
    blocks: int


def measure(device: str = "host", blocks: int = BLOCKS) -> Hit:
    hits, bare = [], []
    with spawn.daemon(device=device, budget="64MiB") as daemon:
        echo = _Echo(f"ipc://@swapd-bench-{os.getpid()}")  # no file, whose path may be too long
        try:
            with swapd_client.connect(daemon.folder, label="bench") as client:
                client.register(NAME, {"weights": bytearray(1 << 20)})
                with client.acquire(NAME):
                    for _ in range(blocks + WARM_UP):
                        bare.append(echo.two_round_trips())
                        hits.append(_hit(client))
        finally:
            echo.close()
    hit_s = statistics.median(hits[WARM_UP:])
    bare_s = statistics.median(bare[WARM_UP:])
    return Hit(hit_s / bare_s, hit_s, bare_s, blocks)


def _hit(client: swapd_client.Client) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        client.acquire(NAME).release()
    return (time.perf_counter() - started) / CALLS


class _Echo:
    def __init__(self, endpoint: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_echo_main, args=(theirs, endpoint))
        self._process.start()
        theirs.close()  # so that its end ends the wait
        self._pipe.recv_bytes()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def two_round_trips(self) -> float:
        requests = protocol.Acquire(1, (NAME,)), protocol.Release(2, 1)
        started = time.perf_counter()
        for _ in range(CALLS):
            for request in requests:
                self._socket.send(protocol.encode(request))
                self._poller.poll()
                protocol.decode_reply(self._socket.recv())
        return (time.perf_counter() - started) / CALLS

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._process.terminate()
        self._process.join()


def _echo_main(pipe: Connection, endpoint: str) -> None:
    import uvloop

    uvloop.run(_echo(pipe, endpoint))


async def _echo(pipe: Connection, endpoint: str) -> None:
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    pipe.send_bytes(b"ready")
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
    """Medians over `steps`. `share`: acquire and release as a share of a step."""

    share: float
    acquire_s: float
    release_s: float
    step_s: float
    steps: int
    #: Uses that the daemon counted, warm-up included: in the end every use is reported.
    uses: int


def decode(device: str = "host", steps: int = STEPS) -> Decode:
    acquires, releases = [], []
    with (
        spawn.daemon(device=device, budget="64MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        client.register("talker", {"weights": bytearray(1 << 20)})
        with swapd_client.connect(daemon.folder, label="observer") as observer:
            hits = observer.status().hits
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
            client.status()  # a request reports the uses before it
            uses = observer.status().hits - hits
    acquire_s = statistics.median(acquires[WARM_UP_STEPS:])
    release_s = statistics.median(releases[WARM_UP_STEPS:])
    share = (acquire_s + release_s) / STEP_S
    return Decode(share, acquire_s, release_s, STEP_S, steps, uses)
