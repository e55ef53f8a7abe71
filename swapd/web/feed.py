"""The daemon's swap log as it grows: each record once, and missing ones counted.

It subscribes first. It takes earlier records from the file, and also those that the stream omits
when records come faster than they are read. It counts the records that neither has.
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

#: Like a command's label: its sessions are not workers.
LABEL = "swapd http"
#: Seconds that the daemon may take for a connection, and for its first answer.
CONNECT_S = 10.0
#: Most unread records here. Beyond that they wait in the daemon, which drops some in the end.
WAITING_MAX = 50_000
#: Most records that are read before other tasks run.
BATCH = 200
#: Longest lag of the file behind the stream.
LAG_S = 2.0


class Feed:
    """The records of one daemon, for one task. Made in any thread; the caller closes it."""

    def __init__(self, path: Path) -> None:
        """Connect to the daemon that serves `path`. Blocks. Raises: SwapdError, OSError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with find(path) as folder:
                self._socket = _subscribed(self._context, folder)
                # only now, so that this session's record comes by the stream, and all records
                # before it are in the file
                self.client: Client = connect(path, label=LABEL, timeout=CONNECT_S)
            self.status: StatusReply = self.client.status(timeout=CONNECT_S)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        #: Set when all records before its start have been read.
        self.begun = asyncio.Event()

    def close(self) -> None:
        """Disconnect. Blocks for a moment."""
        self._context.destroy(linger=0)
        self.client.close()

    async def run(self, take: Callable[[Record], None], missed: Callable[[int], None]) -> None:
        """Call `take` with each record, in order, and `missed` with the number of records missing
        before the next; until it is cancelled."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        whole = Whole(Path(self.status.swap_log), take, missed)
        loop.add_reader(self._socket.fileno(), come.set)
        try:
            while True:
                # libzmq signals only the first message: read until nothing is left
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
    """The records of a stream, completed from a file as far as possible."""

    def __init__(
        self, path: Path, take: Callable[[Record], None], missed: Callable[[int], None]
    ) -> None:
        self._path = path
        self._take = take
        self._missed = missed
        #: The number of the last record passed on.
        self._last = 0

    async def received(self, line: bytes) -> None:
        """Take the next record; skip an old one, or one that this version cannot read."""
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
        """The records missing in the stream, from the file, which may lag behind it."""
        give_up = time.monotonic() + LAG_S
        while True:
            found = await asyncio.to_thread(_between, self._path, self._last, first)
            if len(found) >= first - self._last - 1 or time.monotonic() > give_up:
                return found
            await asyncio.sleep(0.02)


def _subscribed(context: "zmq.Context[zmq.Socket[bytes]]", folder: Folder) -> "zmq.Socket[bytes]":
    """The stream, once the daemon has the subscription. Blocks. Raises: NotAnswering."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(f"ipc://{folder.inside / runtime_dir.EVENTS}")
    if not monitor.poll(int(CONNECT_S * 1000)):
        raise NotAnswering(f"the daemon at {folder.path} accepts no reader of its swap log")
    socket.disable_monitor()
    return socket


def _between(path: Path, last: int, first: int) -> list[Record]:
    """The last run's records after `last` and before `first`, as far as the file has them."""
    with suppress(OSError):
        return [each.record for each in between(path, last, first) if not each.record.dropped]
    return []


def _parsed(line: bytes) -> Record | None:
    """The record; None if this version cannot read it."""
    try:
        return parse(line)
    except (OtherSchema, msgspec.MsgspecError, ValueError, RecursionError):
        return None
