"""Loads ahead against a real daemon: a declared order, and a prefetch that names its victims."""

from collections.abc import Collection
from pathlib import Path

import pytest

from swapd import spawn
from swapd.core import actions
from swapd.log import reader
from swapd_client import Component, connect
from tests import served
from tests.contents import bytes_of

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


@pytest.mark.parametrize("over", [["vae", "nothing"], "vae"])
def test_nothing_goes_but_what_is_named_and_names_that_are_not_there_are_left_out(
    over: Collection[str],
) -> None:
    with spawn.daemon(budget="8MiB") as daemon, connect(daemon.folder) as client:
        for name in ("b", "vae"):  # b was used longer ago
            client.register(name, {"x": bytes_of(name, 4 << 20)})
            client.acquire(name).release()
        client.register("c", {"x": bytes_of("c", 4 << 20)})
        client.prefetch("c", "nobody", over=over)
        client.acquire("c").release()
        assert client.status().evictions == 1
        states = {one.name: one.state for one in client.status().components}
    assert states["vae"] == "absent"
    assert "absent" not in (states["b"], states["c"])
