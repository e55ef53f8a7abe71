"""`swapd log`: the swap log, once or as it grows; readable on a terminal, else JSON lines.

Following misses and doubles nothing: it subscribes first, then reads the file, then takes
from the stream what the file had not; a gap in the stream's numbers is filled from the file.
"""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import zmq
from rich.text import Text

from swapd.cli.common import (
    TIMEOUT_S,
    Endpoint,
    Json,
    Timeout,
    ask,
    console,
    say_error,
    shown_json,
)
from swapd.cli.component_log import show
from swapd.cli.render import line
from swapd.log.history import Line, Seen, last_run, parsed, read, read_runs
from swapd.shared import runtime_dir
from swapd.shared.runtime_dir import Folder
from swapd_client import Client, DaemonStopping, NotAnswering, NotRunning
from swapd_client.session.endpoint import find, resolve

#: How long the last records of a daemon that ends may take.
_WIRE_MS = 5000
#: How far the file may lag behind the stream.
_LAG_S = 2.0

Name = Annotated[
    str | None, typer.Argument(help="One component, or what has parts: why it came and went")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as the log grows")]
All = Annotated[bool, typer.Option("--all", "-a", help="Every record: hits and releases too")]
AllRuns = Annotated[bool, typer.Option("--all-runs", help="Earlier daemons too, not the last only")]
AsText = Annotated[bool, typer.Option("--text", help="Readable also where there is no terminal")]
Lines = Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last so many")]
File = Annotated[
    Path | None, typer.Option("--file", exists=True, dir_okay=False, help="Needs no daemon")
]


def log(
    name: Name = None,
    endpoint: Endpoint = None,
    follow: Follow = False,
    everything: All = False,
    json: Json = False,
    text: AsText = False,
    lines: Lines = None,
    file: File = None,
    all_runs: AllRuns = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show the swap log: what moved, when, and what for.

    On a terminal: swaps, waits and refusals of the daemon that ran last. Elsewhere, or with
    --json: all its records, as they were written. With a NAME: the records of that component,
    each under what caused it.
    """
    if name is not None:
        if follow or all_runs or lines is not None:
            raise typer.BadParameter("NAME goes with neither --follow, --all-runs nor --lines")
        records = last_run(read(swap_log(endpoint, file, timeout)))
        show(records, name, everything=everything, json=json)
        return
    if follow and (file or all_runs):
        raise typer.BadParameter("--follow goes with neither --file nor --all-runs")
    readable = text or (not json and sys.stdout.isatty())
    view = _Readable(everything) if readable else _Raw()
    if follow:
        _follow(endpoint, view, lines, timeout)
        return
    path = swap_log(endpoint, file, timeout)
    if not all_runs:
        view.show(last_run(read(path)), lines)
        return
    found = read_runs(path)
    view.show(found.lines, lines)
    if found.left_out:
        say_error(f"{found.left_out} records are left out: another version of swapd wrote them")


def swap_log(endpoint: str | None, file: Path | None, timeout: float) -> Path:
    """The file of the log: as named, or as the daemon says."""
    if file is not None:
        return file
    try:
        with ask(endpoint, "log", timeout) as client:
            return Path(client.status(timeout=timeout).swap_log)
    except (NotRunning, NotAnswering) as exc:
        left = resolve(endpoint, None) / runtime_dir.SWAP_LOG
        hint = f". The log it left: --file {left}" if left.exists() else ""
        raise type(exc)(f"{exc}{hint}") from exc


class _Readable:
    """Lines for people, coloured on a terminal."""

    def __init__(self, everything: bool) -> None:
        self._everything = everything
        self._seen = Seen()

    def show(self, lines: Iterable[Line], last: int | None = None) -> None:
        for shown in _tail(self._rendered(lines), last):
            console.print(shown, soft_wrap=True)

    def _rendered(self, lines: Iterable[Line]) -> Iterator[Text]:
        for _, record in lines:
            if record.start is not None:
                self._seen = Seen()
            shown = line(record, self._seen, everything=self._everything)
            self._seen.note(record)
            if shown is not None:
                yield shown


class _Raw:
    """The records as they are, one a line."""

    def show(self, lines: Iterable[Line], last: int | None = None) -> None:
        for raw, _ in _tail(lines, last):
            sys.stdout.buffer.write(shown_json(raw) + b"\n")
        sys.stdout.buffer.flush()


def _tail(items: Iterable[Any], last: int | None) -> Iterable[Any]:
    return items if last is None else deque(items, maxlen=last)


# --- following -------------------------------------------------------------------------------


def _follow(
    endpoint: str | None, view: "_Readable | _Raw", lines: int | None, timeout: float
) -> None:
    with find(resolve(endpoint, None)) as folder, zmq.Context() as context:
        try:
            feed, monitor = _subscribe(context, folder, timeout)
            # Only now: so the record of this very session comes by the stream, and with it
            # the number up to which the file must be read.
            with ask(endpoint, "log", timeout) as client:
                path = Path(client.status(timeout=timeout).swap_log)
                found = last_run(read(path))
                view.show(found, lines)
                last = found[-1].record.seq if found else 0
                for fresh in _stream(client, feed, monitor):
                    last = _show_fresh(view, fresh, last, path)
                _say_how_it_ended(client)
        finally:
            context.destroy(linger=0)


def _subscribe(
    context: "zmq.Context[zmq.Socket[bytes]]", folder: Folder, timeout: float
) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Subscribe; return when the daemon knows of it, or does not answer."""
    feed = context.socket(zmq.SUB)
    feed.setsockopt(zmq.RCVHWM, 0)
    feed.subscribe(b"")
    refused = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED
    monitor = feed.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | refused
    )
    feed.connect(f"ipc://{folder.inside / runtime_dir.EVENTS}")
    monitor.poll(int(timeout * 1000))
    while monitor.poll(0):
        monitor.recv_multipart()
    return feed, monitor


def _stream(
    client: Client, feed: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]"
) -> Iterator[list[Line]]:
    """The records as they come, in batches, until the daemon has ended and said its last."""
    poller = zmq.Poller()
    poller.register(feed, zmq.POLLIN)
    poller.register(client.session.life.ended.fileno(), zmq.POLLIN)
    while any(ready is feed for ready, _ in poller.poll()) or client.session.error is None:
        yield _received(feed)
    monitor.poll(_WIRE_MS)  # the stream is closed: all that was sent has arrived
    yield _received(feed)


def _received(feed: "zmq.Socket[bytes]") -> list[Line]:
    packets: list[bytes] = []
    with suppress(zmq.Again):
        while True:
            packets.append(feed.recv(zmq.NOBLOCK))
    return list(parsed(packets))


def _show_fresh(view: "_Readable | _Raw", fresh: list[Line], last: int, path: Path) -> int:
    """Show what is new; return the number of the last record shown."""
    fresh = [found for found in fresh if found.record.seq > last]
    if not fresh:
        return last
    if fresh[0].record.seq > last + 1:
        view.show(_between(path, last, fresh[0].record.seq))
    view.show(fresh)
    return fresh[-1].record.seq


def _between(path: Path, last: int, first: int) -> list[Line]:
    """The records that the stream did not bring, from the file, which may lag behind it."""
    give_up = time.monotonic() + _LAG_S
    while True:
        found = [each for each in last_run(read(path)) if last < each.record.seq < first]
        if len(found) >= first - last - 1 or time.monotonic() > give_up:
            return found
        time.sleep(0.01)


def _say_how_it_ended(client: Client) -> None:
    error = client.session.error
    if isinstance(error, DaemonStopping):
        say_error("the daemon has stopped, and with it its log")
    elif error is not None:
        say_error("the daemon is gone without a goodbye, and with it its log")
        sys.exit(1)
