"""The daemon's swap log as it grows, record by record: none doubled, none left out unnoticed.

It subscribes first; what came before, and what the stream leaves out when records come faster than
they are read, is taken from the file. What is in neither is counted.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from swapd.log.between import between
from swapd.log.records import OtherSchema, Record, parse
from swapd.shared import runtime_dir
from swapd.shared.protocol import StatusReply
from swapd.shared.runtime_dir import Folder
from swapd_client import Client, NotAnswering, connect
from swapd_client.session.endpoint import find

#: As commands are called, whose sessions are no workers.
LABEL = "swapd http"
#: How long the daemon may take to let in, and to answer first.
CONNECT_S = 10.0
#: Records that wait to be read here. Past that they wait in the daemon, which drops some at last.
WAITING_MAX = 50_000
#: So many are looked at before anything else has its turn.
BATCH = 200
#: How far the file may lag behind the stream.
LAG_S = 2.0


class Feed:
    """Of one daemon, for one task. Made in any thread; the caller closes it."""

    def __init__(self, path: Path) -> None:
        """Connect to the daemon that serves `path`. Blocks. Raises: SwapdError, OSError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with find(path) as folder:
                self._socket = _subscribed(self._context, folder)
                # only now: the record of this session comes by the stream, and what was before it
                # is in the file
                self.client: Client = connect(path, label=LABEL, timeout=CONNECT_S)
            self.status: StatusReply = self.client.status(timeout=CONNECT_S)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        #: Set when all that was there before this has been looked at.
        self.begun = asyncio.Event()

    def close(self) -> None:
        """Let go of the daemon. Blocks for a moment."""
        self._context.destroy(linger=0)
        self.client.close()

    async def run(self, take: Callable[[Record], None], missed: Callable[[int], None]) -> None:
        """Call `take` with each record, in order, and `missed` with how many there are none of
        before the next; until it is cancelled."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        whole = Whole(Path(self.status.swap_log), take, missed)
        loop.add_reader(self._socket.fileno(), come.set)
        try:
            while True:
                # libzmq says only once that there is something: read until nothing is left
                while lines := self._read():
                    for line in lines:
                        await whole.received(line)
                    self.begun.set()
                    await asyncio.sleep(0)
                await come.wait()
                come.clear()
        finally:
            loop.remove_reader(self._socket.fileno())

    def _read(self) -> list[bytes]:
        lines: list[bytes] = []
        with suppress(zmq.Again):
            while len(lines) < BATCH:
                lines.append(self._socket.recv(zmq.NOBLOCK))
        return lines


class Whole:
    """What a stream brings, and before each record what it left out, as far as a file has it."""

    def __init__(
        self, path: Path, take: Callable[[Record], None], missed: Callable[[int], None]
    ) -> None:
        self._path = path
        self._take = take
        self._missed = missed
        #: The number of the record that was handed on last.
        self._last = 0

    async def received(self, line: bytes) -> None:
        """The next one; one that is not new, or that this version does not read, is passed over."""
        record = _parsed(line)
        if record is None or record.seq <= self._last:
            return
        if record.seq > self._last + 1:
            for at, found in enumerate(await self._before(record.seq)):
                self._hand_on(found)
                if at % BATCH == BATCH - 1:
                    await asyncio.sleep(0)
        self._hand_on(record)

    def _hand_on(self, record: Record) -> None:
        if record.seq > self._last + 1:
            self._missed(record.seq - self._last - 1)
        self._last = record.seq
        self._take(record)

    async def _before(self, first: int) -> list[Record]:
        """The records that the stream did not bring, from the file, which may lag behind it."""
        give_up = time.monotonic() + LAG_S
        while True:
            found = await asyncio.to_thread(_between, self._path, self._last, first)
            if len(found) >= first - self._last - 1 or time.monotonic() > give_up:
                return found
            await asyncio.sleep(0.02)


def _subscribed(context: "zmq.Context[zmq.Socket[bytes]]", folder: Folder) -> "zmq.Socket[bytes]":
    """The stream, once the daemon knows of it. Blocks. Raises: NotAnswering."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(f"ipc://{folder.inside / runtime_dir.EVENTS}")
    if not monitor.poll(int(CONNECT_S * 1000)):
        raise NotAnswering(f"the daemon at {folder.path} lets nobody read its swap log")
    socket.disable_monitor()
    return socket


def _between(path: Path, last: int, first: int) -> list[Record]:
    """Of the run that wrote last, the records after `last` and before `first` that are there."""
    with suppress(OSError):
        return [each.record for each in between(path, last, first) if not each.record.dropped]
    return []


def _parsed(line: bytes) -> Record | None:
    """None for what this version does not read."""
    try:
        return parse(line)
    except (OtherSchema, msgspec.MsgspecError, ValueError, RecursionError):
        return None
