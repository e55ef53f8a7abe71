"""A declared order, from clients in several sessions, against a real daemon."""

from pathlib import Path

import pytest

from swapd import spawn
from swapd.core import actions
from swapd.log import reader
from swapd_client import Component, InvalidArgument, connect_async
from tests import served

NAMES = ("thinker", "talker", "code2wav")
SIZE = 4 << 20


def test_stages_come_in_for_one_another_with_their_bytes(tmp_path: Path) -> None:
    swap_log = tmp_path / "log.jsonl"
    with served.pair(budget=2 * SIZE, swap_log=swap_log) as (_, one, other):
        owners = dict(zip(NAMES, (one, other, one), strict=True))
        for name, after in zip(NAMES, (NAMES[-1], *NAMES), strict=False):
            other.follows(name, after=after)  # before any of them is there
        stages: dict[str, Component] = {}
        for number, (name, client) in enumerate(owners.items()):
            stages[name] = client.register(name, {"w": bytes([number + 1]) * SIZE})
        for name in NAMES * 3:
            with owners[name].acquire(name):
                view = bytes(stages[name].view("w"))
                assert view == bytes([NAMES.index(name) + 1]) * SIZE
    done = [line.record.action for line in reader.read(swap_log)]
    came = [(a.name, a.after) for a in done if isinstance(a, actions.Foreseen) and a.saved_s]
    assert {("talker", "thinker"), ("code2wav", "talker"), ("thinker", "code2wav")} >= set(came)
    assert came, "nothing was loaded ahead"


async def test_so_it_is_with_asyncio_and_bad_input_is_named() -> None:
    with spawn.daemon(budget="8MiB") as daemon:
        client = await connect_async(daemon.folder)
        await client.follows("b", "c", after="a")
        await client.follows(after="a")
        with pytest.raises(InvalidArgument, match="cannot follow itself"):
            await client.follows("a", after="a")
        await client.close()
