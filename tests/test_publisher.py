"""The stream of the swap log: no reader delays the daemon, and losses are whole records."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from swapd.daemon import router, zmtp
from swapd.daemon.router import Publisher
from swapd.daemon.zmtp import Decoder

LAST = b"aaa"


class Reader:
    """A SUB socket without libzmq, so that it reads only when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(folder / "sock"))
        self._decoder = Decoder((b"PUB",), 1 << 20)

    def subscribe(self, *topics: bytes) -> None:
        self.sock.sendall(zmtp.GREETING + zmtp.ready(b"SUB"))
        for topic in topics:
            self.sock.sendall(zmtp.frame(b"\1" + topic))

    def read(self) -> bytes | None:
        """The next record; None at the end."""
        while (frames := self._decoder.next()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._decoder.feed(data)
        return frames[0]


@asynccontextmanager
async def published(folder: Path, *topics: bytes) -> AsyncIterator[tuple[Publisher, Reader]]:
    """A publisher, and a reader that has read a first record."""
    loop = asyncio.get_running_loop()
    crashed: asyncio.Future[None] = loop.create_future()
    made = Publisher(loop, folder / "sock", crashed.set_exception)
    reader = Reader(folder)
    reader.subscribe(*topics)
    first = loop.run_in_executor(None, reader.read)
    while not first.done():
        made.publish([topics[0]])
        await asyncio.wait((first,), timeout=0.01)
    await first
    try:
        yield made, reader
        assert not crashed.done()
    finally:
        made.close()
        reader.sock.close()


async def rest(reader: Reader) -> list[bytes]:
    """The records up to the end, or to LAST, without those of the set-up."""
    found: list[bytes] = []
    while (line := await asyncio.to_thread(reader.read)) not in (None, LAST):
        assert line is not None
        found.append(line)
    return [line for line in found if line != b"a"]


async def test_a_subscriber_gets_what_it_asked_for_in_order_up_to_the_end(tmp_path: Path) -> None:
    async with published(tmp_path, b"a", b"c") as (made, reader):
        lines = [b"%c%d" % (b"abc"[i % 3], i) for i in range(3_000)]
        reading = asyncio.get_running_loop().create_task(rest(reader))
        for at in range(0, len(lines), 100):
            made.publish(lines[at : at + 100])
            await asyncio.sleep(0)
        made.publish([LAST])
        assert await reading == [line for line in lines if line[:1] in b"ac"]


@pytest.mark.parametrize(("bound", "most"), [("BACKLOG_MAX", 100), ("BACKLOG_MAX_BYTES", 10_000)])
async def test_who_does_not_read_misses_whole_records_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(router, bound, most)
    async with published(tmp_path, b"a") as (made, reader):
        lines = [b"a%0100d" % i for i in range(50_000)]
        for at in range(0, len(lines), 100):
            made.publish(lines[at : at + 100])
        (peer,) = made._subscribers
        kept = peer.waiting if bound == "BACKLOG_MAX" else peer.waiting_bytes
        assert most <= kept < most + len(lines[0]) + 10
        made.close()
        got = await rest(reader)
        assert got == lines[: len(got)]
        assert 100 < len(got) < len(lines)


async def test_a_stream_ends_soon_also_for_who_does_not_read(tmp_path: Path) -> None:
    async with published(tmp_path, b"a") as (made, _):
        made.publish([b"a%0100d" % i for i in range(50_000)])
        assert made._behind()
        made.close()


async def test_who_still_reads_has_the_stream_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "LINGER_S", 20.0)
    async with published(tmp_path, b"a") as (made, reader):
        lines = [b"a%0100d" % i for i in range(50_000)]
        made.publish(lines)
        reading = asyncio.get_running_loop().run_in_executor(
            None, lambda: [*iter(reader.read, None)]
        )
        made.close()
        assert [line for line in await reading if line != b"a"] == lines


async def test_who_missed_records_is_told_how_many_once_it_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "BACKLOG_MAX", 100)
    async with published(tmp_path, b"") as (made, reader):
        lines = [b'{"seq":%d,"t":1.5,"type":"event","pad":"%0100d"}' % (i, 0) for i in range(9_000)]
        for at in range(0, len(lines), 100):
            made.publish(lines[at : at + 100])
        reading = asyncio.get_running_loop().create_task(rest(reader))
        while made._behind():
            await asyncio.wait((reading,), timeout=0.01)
        made.publish([lines[-1]])
        made.publish([LAST])
        got = [msgspec.json.decode(line) for line in await reading if line]
    (note,) = [each for each in got if each["type"] == "dropped"]
    kept = [each["seq"] for each in got if each["type"] == "event"]
    assert note["seq"] == kept[-1] == 8_999
    assert note["count"] == len(lines) - (len(kept) - 1)
