"""Pages get changes in bounded messages, however fast a daemon swaps and however slow they read."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swapd.core import actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.protocol import StatusReply
from swapd.web import live as module
from swapd.web.live import Live

NOTHING = StatusReply(
    id=1, version="9.9", device="host", runtime_dir="/run/swapd", swap_log="", isolation="relaxed",
    uptime_s=0.0, chunk_bytes=4, budget_bytes=400, used_bytes=0, peak_bytes=0,
    quarantined_bytes=0, host_copy_bytes=0, waiting=0, loads=0, evictions=0, hits=0, bytes_in=0,
    bytes_out=0, components=(), sessions=(),
)  # fmt: skip


class Played:
    """A live picture of records that a test makes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.live = Live(NOTHING, lambda: self.now)
        self._seq = 0

    def say(self, *what: AnyEvent | AnyAction) -> None:
        for said in what:
            self._seq += 1
            if isinstance(said, events.Event):
                record = Record(self._seq, 0, self.now, event=said)
            else:
                record = Record(self._seq, 0, self.now, action=said)
            self.live.take(record)

    def register(self, uid: int, name: str, part_of: str = "") -> None:
        self.say(
            events.Asked(self.now, 1, protocol.Register(uid, name, 4, part_of=part_of)),
            actions.MakeHostCopy(1, uid, name, 4, False, request=uid),
            events.HostCopySealed(self.now, uid),
        )

    def load(self, uid: int, name: str, generation: int) -> None:
        self.say(
            actions.CopyIn(uid, name, generation, 4, ((0, 1),)),
            events.CopiedIn(self.now, generation),
        )


async def told(updates: AsyncIterator[bytes]) -> Any:
    while not (found := await anext(updates)).rpartition(b"data: ")[1]:
        continue
    return json.loads(found.rpartition(b"data: ")[2])


async def test_the_first_update_has_everything_and_the_next_what_has_changed() -> None:
    played = Played()
    played.register(1, "a")
    updates = played.live.updates()
    first = await told(updates)
    assert first["whole"]
    assert [row["name"] for row in first["rows"]] == ["a"]
    played.load(1, "a", 1)
    played.register(2, "b")
    played.say(events.SessionOpened(played.now, 1, "w"))
    second = await told(updates)
    rows = {row["name"]: row["state"] for row in second["rows"]}
    assert rows == {"a": "idle", "b": "absent"}
    assert [line["verb"] for line in second["lines"]] == ["register", "in", "register", "opened"]
    assert "whole" not in second


async def test_who_has_missed_an_update_gets_everything_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "APART_S", 0.0)
    played = Played()
    slow, fast = played.live.updates(), played.live.updates()
    await told(slow)
    await told(fast)
    for uid in (1, 2):
        played.register(uid, f"c{uid}")
        await told(fast)
    assert {row["name"] for row in (await told(slow))["rows"]} == {"c1", "c2"}


async def test_parts_are_one_row() -> None:
    played = Played()
    for uid in range(1, 5):
        played.register(uid, f"dit/{uid}", part_of="dit")
    played.load(1, "dit/1", 1)
    (row,) = (await told(played.live.updates()))["rows"]
    assert (row["name"], row["parts"], row["parts_in"]) == ("dit", 4, 1)
    assert (row["bytes"], row["inside"], row["where"]) == (16, 4, ["r", 0.25])


async def test_the_past_of_what_swaps_all_the_time_is_bounded() -> None:
    played = Played()
    played.register(1, "a")
    for at in range(2000):
        played.now += 0.05
        played.load(1, "a", at)
        played.live._update()
        played.say(actions.Evict("a", at, "room"), actions.Evicted("a", at, 4, 0))
        played.live._update()
    track = (await told(played.live.updates()))["tracks"]["a"]
    assert len(track) <= module.TRACK_MAX
    assert track == sorted(track, key=lambda mark: mark[0])
    assert track[-1][1] == "o"
    assert track[-1][0] - track[0][0] > 60, "too little of the past is left"


async def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", 10)
    played = Played()
    for uid in range(1, 30):
        played.register(uid, f"c{uid}")
    played.live._update()
    first = await told(played.live.updates())
    assert len(first["rows"]) == 10
    assert len(first["tracks"]) == 10


async def test_pages_are_told_that_the_daemon_has_ended() -> None:
    played = Played()
    updates = played.live.updates()
    await told(updates)
    asyncio.get_running_loop().call_soon(played.live.close)
    assert b"event: ended" in await anext(updates)
    with pytest.raises(StopAsyncIteration):
        await anext(updates)
    assert played.live.viewers == 0


async def test_what_others_wrote_is_harmless() -> None:
    played = Played()
    played.register(1, "</script><b>")
    first = await told(played.live.updates())
    assert first["rows"][0]["name"] == "</script><b>"
    whole = await anext(played.live.updates())
    assert whole.count(b"\n\n") == 2, "an event ends at an empty line, and there is one more"
