"""The page's data as JSON: everything for a new page, then the changes.

It gathers changes for a moment, so a page gets a few updates a second, however fast records come.
It keeps nothing for a slow page, which gets everything anew instead. All data is bounded: the
components, the records, and the history of each component.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from swapd.cli.render import say
from swapd.core import actions, events
from swapd.log.picture import Item, Picture, Wait
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.protocol import StatusReply
from swapd.shared.text import plain

#: Changes wait so long for others; the least time between updates.
GATHER_S = 0.02
APART_S = 0.1
#: A silent connection gets a comment so often, as a sign of life.
SILENCE_S = 15.0
#: Most records, components and waits that a page shows.
LINES = 60
ROWS_MAX = 500
WAITS_MAX = 50
#: Bounds of the history. Frequent changes are reduced to one state a second.
PAST_S = 300.0
TRACK_MAX = 400
TRACK_DENSE = 100
DENSE_S = 1.0

#: Codes of drawn states: loading, held, resident, leaving; all others are out.
_CODES = {"loading": "l", "lending": "l", "resident": "r", "lent": "h"}
_LEAVING = ("revoking", "writing back", "reclaiming")

#: Requests that a page never shows: making their text would be wasted.
_UNSAID = (protocol.Acquire, protocol.Release, protocol.Cancel, protocol.Prefetch, protocol.Commit)

#: Time, state and resident share; the share of a component without parts is 1.
Mark = tuple[float, str, float]


class Live:
    """The data of one daemon. A feed calls `take` and `missed`; all in one loop."""

    def __init__(self, status: StatusReply, clock: Callable[[], float]) -> None:
        """`clock()`: Unix time."""
        self.picture = Picture()
        self.status = status
        self._clock = clock
        self._started = clock() - status.uptime_s
        self._loop = asyncio.get_running_loop()
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES)
        self._fresh: list[dict[str, Any]] = []
        self._tracks: dict[str, deque[Mark]] = {}
        self._version = 0
        self._delta = b""
        self._whole = b""
        self._due: asyncio.TimerHandle | None = None
        self._updated_at = 0.0
        self._news = asyncio.Event()
        self.viewers = 0
        #: Set when a page connects: its memory figures should not be old.
        self.looked_at = asyncio.Event()
        self.closed = False

    def take(self, record: Record) -> None:
        if line := self._line(record):
            self._lines.append(line)
            self._fresh.append(line)
            del self._fresh[:-LINES]
        self.picture.note(record)
        self._gather()

    def missed(self, count: int) -> None:
        self.picture.missed(count)
        self._gather()

    def told(self, status: StatusReply) -> None:
        """Take the daemon's status."""
        self.status = status
        self.picture.correct(status)
        self._gather()

    def close(self) -> None:
        """The daemon has ended: end `updates`."""
        self.closed = True
        self._news.set()

    async def updates(self) -> AsyncIterator[bytes]:
        """Server-sent events for one page, the first with everything; until the daemon ends."""
        self.viewers += 1
        self.looked_at.set()
        try:
            seen = self._version
            yield b"retry: 1000\n\n" + _sent(self._everything())
            while not self.closed:
                if seen == self._version and not await self._is_news():
                    yield b": nothing\n\n"
                elif seen != self._version:
                    update = self._delta if seen == self._version - 1 else self._everything()
                    seen = self._version
                    yield _sent(update)
            yield b"event: ended\ndata: {}\n\n"
        finally:
            self.viewers -= 1

    async def _is_news(self) -> bool:
        """Wait for an update or the end; False after SILENCE_S."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    # --- updates -------------------------------------------------------------------------

    def _gather(self) -> None:
        if self._due is None:
            wait_s = max(self._updated_at + APART_S - self._loop.time(), GATHER_S)
            self._due = self._loop.call_later(wait_s, self._update)

    def _update(self) -> None:
        self._due = None
        self._updated_at = self._loop.time()
        changed, self.picture.changed = self.picture.changed, set()
        rows, gone = self._rows(changed)
        marks = self._mark(rows)
        for name in gone:
            self._tracks.pop(name, None)
        self._version += 1
        self._whole = b""
        if self.viewers:
            fresh = {"rows": rows, "gone": gone, "lines": self._fresh, "tracks": marks}
            self._delta = msgspec.json.encode({**self._summary(), **fresh})
        self._fresh = []
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _everything(self) -> bytes:
        """Encoded once for all pages that need it before the next update."""
        if not self._whole:
            since = self._clock() - PAST_S
            rows, _ = self._rows(self.picture.items)
            tracks = {
                row["name"]: _recent(self._tracks.get(row["name"], ()), since) for row in rows
            }
            whole = {"whole": True, "rows": rows, "lines": list(self._lines), "tracks": tracks}
            self._whole = msgspec.json.encode({**self._summary(), **whole})
        return self._whole

    def _summary(self) -> dict[str, Any]:
        now, status, counts = self.picture, self.status, self.picture.counts
        waits = sorted(now.waits.values(), key=lambda wait: wait.since)
        tallies = counts.of.values()
        return {
            "now": self._clock(),
            "device": status.device,
            "version": status.version,
            "isolation": status.isolation,
            "folder": plain(status.runtime_dir),
            "started": self._started,
            "budget": status.budget_bytes,
            "used": min(self._used() + status.quarantined_bytes, status.budget_bytes),
            "quarantined": status.quarantined_bytes,
            "host_copies": status.host_copy_bytes,
            "pinned": status.pinned_bytes,
            "unpinned": status.unpinned_bytes,
            "device_bytes": status.device_bytes,
            "device_free": status.device_free_bytes,
            "notes": [plain(note) for note in status.notes],
            "loads": sum(tally.loads for tally in tallies),
            "evictions": sum(tally.evictions for tally in tallies),
            "hits": sum(tally.hits for tally in tallies),
            "bytes_in": counts.bytes_in,
            "bytes_out": counts.bytes_out,
            "missed": counts.missed,
            "waiting": len(waits),
            "waits": [self._wait(wait) for wait in waits[:WAITS_MAX]],
        }

    def _used(self) -> int:
        """Bytes of the resident components, in whole chunks."""
        chunk = self.status.chunk_bytes
        items = self.picture.items.values()
        return sum(-(-item.nbytes // chunk) * chunk for item in items if item.inside)

    def _wait(self, wait: Wait) -> dict[str, Any]:
        who = self.picture.seen.labels.get(wait.session, "")
        return {
            "who": f"{plain(who)} (session {wait.session})",
            "names": [plain(name) for name in wait.names[:8]],
            "more": max(len(wait.names) - 8, 0),
            "since": wait.since,
            "why": plain(wait.why),
        }

    def _rows(self, names: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows of these items, with parts together; and rows to remove."""
        items = self.picture.items
        wanted = {_row_of(items[name]) if name in items else name for name in names}
        parts: dict[str, list[Item]] = {}
        for item in items.values():
            key = _row_of(item)
            if key in wanted and (key in parts or len(parts) < ROWS_MAX):
                parts.setdefault(key, []).append(item)
        gone = [plain(name) for name in wanted - parts.keys()]
        return [_row(plain(name), of) for name, of in parts.items()], gone

    # --- the past ------------------------------------------------------------------------

    def _mark(self, rows: Iterable[dict[str, Any]]) -> dict[str, list[Mark]]:
        """Record the rows whose drawn state changed; return these marks."""
        fresh = {}
        now = round(self._clock(), 2)
        for row in rows:
            name = row["name"]
            track = self._tracks.get(name)
            if track is None:
                if len(self._tracks) >= ROWS_MAX:
                    continue
                track = self._tracks[name] = deque(maxlen=TRACK_MAX)
            mark = (now, *row["where"])
            if track and track[-1][1:] == mark[1:]:
                continue
            if len(track) > TRACK_DENSE and track[-1][0] > now - DENSE_S:
                mark = (track.pop()[0], *row["where"])  # the page replaces marks of the same time
            track.append(mark)
            fresh[name] = [mark]
        return fresh

    def _line(self, record: Record) -> dict[str, Any] | None:
        """The line of a record, if people follow such records."""
        event, action = record.event, record.action
        if type(event) is events.Asked:
            if isinstance(event.request, _UNSAID):
                return None
        elif type(action) is actions.Grant and not action.waited_s:
            return None
        said = say(record, self.picture.seen)
        if not said.swap:
            return None
        return {
            "seq": record.seq,
            "t": record.time,
            "verb": said.verb,
            "subject": plain(said.subject),
            "detail": plain(" ".join(said.detail.split())),
            "style": said.style,
        }


def _sent(data: bytes) -> bytes:
    """The data as a server-sent event: JSON has no line break."""
    return b"data: " + data + b"\n\n"


def _row_of(item: Item) -> str:
    return item.part_of or item.name


def _row(name: str, parts: list[Item]) -> dict[str, Any]:
    first = parts[0]
    total = sum(part.nbytes for part in parts)
    inside = sum(part.nbytes for part in parts if part.inside)
    holders: dict[str, int] = {}
    for part in parts:
        for who, count in part.holders.items():
            holders[plain(who)] = max(holders.get(plain(who), 0), count)
    return {
        "name": name,
        "bytes": total,
        "inside": inside,
        "parts": len(parts) if first.part_of else 0,
        "parts_in": sum(part.inside for part in parts),
        "state": _state(parts),
        "where": (_code(parts), round(inside / total, 2) if total else 1.0),
        "policy": first.policy,
        "group": plain(first.group or ""),
        "kind": first.kind,
        "mutable": first.mutable,
        "holders": [f"{who} x{count}" if count > 1 else who for who, count in holders.items()],
        "loads": sum(part.loads for part in parts),
        "evictions": sum(part.evictions for part in parts),
        "hits": sum(part.hits for part in parts),
        "swap_in_s": None if first.part_of else first.swap_in_s,
        "used_at": max((part.used_at or 0.0 for part in parts), default=0.0),
    }


def _state(parts: list[Item]) -> str:
    states = {part.state for part in parts}
    if any(part.leases for part in parts):
        return "leased"
    if len(states) > 1:
        return "in part"
    (state,) = states
    return "idle" if state == "resident" else state


def _code(parts: list[Item]) -> str:
    """The code of the row's drawn state."""
    inside = [part for part in parts if part.inside]
    if not inside:
        return "o"
    if any(part.leases for part in inside):
        return "h"
    codes = {_CODES.get(part.state, "v" if part.state in _LEAVING else "r") for part in inside}
    return next(code for code in "lvrh" if code in codes)


def _recent(track: Iterable[Mark], since: float) -> list[Mark]:
    """The marks since then, and the last one before."""
    marks = list(track)
    first = next((at for at, mark in enumerate(marks) if mark[0] >= since), len(marks))
    return marks[max(first - 1, 0) :]
