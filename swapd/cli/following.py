"""`swapd log -f`: the file, then the stream.

It shows each record exactly once: it subscribes, then reads the file, then takes newer records from
the stream. It fills a gap in the stream's numbers from the file, and counts the records that the
file does not have.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import zmq

from swapd.cli.common import ask, say_error
from swapd.cli.log_views import View
from swapd.log.between import between
from swapd.log.history import Line, last_run, parsed, read
from swapd.log.records import Record, render
from swapd.shared import runtime_dir
from swapd.shared.runtime_dir import Folder
from swapd_client import Client, DaemonStopping
from swapd_client.session.endpoint import find, resolve

#: Longest wait for the last records of a daemon that ends.
_WIRE_MS = 5000
#: Longest lag of the file behind the stream.
_LAG_S = 2.0
#: After so long without a record, the view shows the lines that it held back.
_PAUSE_MS = 500


def follow_log(endpoint: str | None, view: View, lines: int | None, timeout: float) -> None:
    """Show the last `lines` of the log, then its growth, until the daemon ends.

    Blocks. Raises: NotRunning, NotAnswering; SystemExit(1) if the daemon died.
    """
    with find(resolve(endpoint, None)) as folder, zmq.Context() as context:
        try:
            feed, monitor = _subscribe(context, folder, timeout)
            # Only now, so that the stream has the record of this session. Its number is the one
            # up to which the file must be read.
            with ask(endpoint, "log", timeout) as client:
                path = Path(client.status(timeout=timeout).swap_log)
                found = last_run(read(path))
                view.show(found, lines, more=True)
                last = found[-1].record.seq if found else 0
                for fresh in _stream(client, feed, monitor, view):
                    last = _show_fresh(view, fresh, last, path)
                view.show([])
                _say_how_it_ended(client)
        finally:
            context.destroy(linger=0)


def _subscribe(
    context: "zmq.Context[zmq.Socket[bytes]]", folder: Folder, timeout: float
) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Subscribe; return when the daemon has the subscription, or does not answer."""
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
    client: Client,
    feed: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    view: View,
) -> Iterator[list[Line]]:
    """The records as they come, in batches, until the daemon has ended and sent its last one.

    After a pause, `view` shows the lines that it held back.
    """
    poller = zmq.Poller()
    poller.register(feed, zmq.POLLIN)
    poller.register(client.session.life.ended.fileno(), zmq.POLLIN)
    while True:
        ready = poller.poll(_PAUSE_MS if view.keeps_back else None)
        if not ready:
            view.show([])
        if not any(one is feed for one, _ in ready) and client.session.error is not None:
            break
        yield _received(feed)
    monitor.poll(_WIRE_MS)  # the stream is closed: everything sent has arrived
    yield _received(feed)


def _received(feed: "zmq.Socket[bytes]") -> list[Line]:
    packets: list[bytes] = []
    with suppress(zmq.Again):
        while True:
            packets.append(feed.recv(zmq.NOBLOCK))
    return list(parsed(packets))


def _show_fresh(view: View, fresh: list[Line], last: int, path: Path) -> int:
    """Show new records, and those missing in the stream; return the last record's number."""
    for seqs in _without_gaps(found for found in fresh if found.record.seq > last):
        if (first := seqs[0].record.seq) > last + 1:
            view.show(_between(path, last, seqs[0]), more=True)
        view.show(seqs, more=True)
        last = max(first, seqs[-1].record.seq)
    return last


def _without_gaps(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Groups of records with consecutive numbers."""
    run: list[Line] = []
    for found in lines:
        if found.record.dropped:
            continue  # the numbers show it, too
        if run and found.record.seq != run[-1].record.seq + 1:
            yield run
            run = []
        run.append(found)
    if run:
        yield run


def _between(path: Path, last: int, following: Line) -> list[Line]:
    """The records missing in the stream, from the file, which may lag behind it.

    One record counts those that the file does not have.
    """
    first = following.record.seq
    give_up = time.monotonic() + _LAG_S
    while True:
        found = between(path, last, first)
        missing = first - last - 1 - sum(each.record.dropped or 1 for each in found)
        if missing <= 0:
            return found
        if time.monotonic() > give_up:
            note = Record(first, 0, following.record.time, dropped=missing)
            return [*found, Line(render(note), note)]
        time.sleep(0.01)


def _say_how_it_ended(client: Client) -> None:
    error = client.session.error
    if isinstance(error, DaemonStopping):
        say_error("the daemon has stopped, so its log ends here")
    elif error is not None:
        say_error("the daemon is gone without a goodbye, so its log ends here")
        sys.exit(1)
