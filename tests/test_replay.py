"""A log that a real daemon wrote is a test: its replay gives the same actions."""

from pathlib import Path

import pytest

from swapd.core import Rules, actions, events
from swapd.log.reader import last_run, read
from swapd.log.records import Record, Start, render
from swapd.log.replay import ReplayError, replay
from swapd.shared.protocol import Register
from swapd_client import Client, Timeout, UnknownComponent
from tests import served
from tests.threads import started

MIB = 1 << 20
ROOT = Path(__file__).parent.parent


def _work(thinker: Client, talker: Client) -> None:
    """The actions of two workers: swaps, waits, refusals, a prefetch, an order."""
    thinker.register("thinker", {"w": bytearray(12 * MIB)})
    talker.register("talker", {"w": bytearray(8 * MIB)}, mutable=True)
    talker.register("vocoder", {"w": bytearray(3 * MIB)}, policy="sequential")
    talker.follows("talker", after="thinker")
    for _ in range(3):
        for client, name in ((thinker, "thinker"), (talker, "talker"), (talker, "vocoder")):
            client.acquire(name).release()
    with thinker.acquire("thinker"), pytest.raises(Timeout):
        talker.acquire("talker", timeout=0.01)
    with pytest.raises(UnknownComponent):
        thinker.acquire("talkr")
    thinker.prefetch("thinker")
    lease = talker.acquire("talker")
    waiting = started(lambda: thinker.acquire("thinker").release())
    lease.release()
    waiting.join()
    talker.unregister("talker")


@pytest.mark.parametrize("isolation", ["relaxed", "strict"])
def test_the_log_of_a_real_daemon_replays(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'client'}")
    swap_log = tmp_path / "swap-log.jsonl"
    settings = {"budget": "16MiB", "isolation": isolation, "swap_log": swap_log}
    with served.pair("a", "b", **settings) as (_, thinker, talker):
        _work(thinker, talker)
    lines = [line.raw for line in last_run(read(swap_log))]
    steps = list(replay(lines))
    for step in steps:
        assert step.actions == step.recorded, f"record {step.seq}: {step.event}"
    done = {type(action) for step in steps for action in step.actions}
    assert {actions.Evict, actions.CopyOut, actions.Refuse, actions.Waiting} <= done
    assert isinstance(steps[-1].event, events.Stopping)


START = Record(1, 0, 1.0, start=Start("9.9", "host", 8, 2 << 20, Rules()))
OPENED = Record(2, 0, 1.0, event=events.SessionOpened(1.0, 1, "w"))
REGISTER = Record(3, 0, 1.0, event=events.SessionRequest(1.0, 1, Register(1, "vae", 5)))
MAKE = Record(4, 3, 1.0, action=actions.MakeHostCopy(1, 1, "vae", 5, False))


def test_what_differs_is_seen() -> None:
    other = Record(4, 3, 1.0, action=actions.MakeHostCopy(1, 1, "vae", 6, False))
    *_, step = replay(map(render, [START, OPENED, REGISTER, other]))
    assert step.actions != step.recorded


def test_an_event_whose_actions_were_cut_off_is_left_out() -> None:
    assert [s.seq for s in replay(map(render, [START, OPENED, REGISTER, MAKE]))] == [2, 3]
    assert [s.seq for s in replay(map(render, [START, OPENED, REGISTER]))] == [2]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [OPENED],
        [START, MAKE],
        [START, OPENED, START],
        [START, OPENED, MAKE],
        [START, Record(2, 0, 1.0, dropped=3)],
    ],
)
def test_a_log_with_holes_is_refused(records: list[Record]) -> None:
    with pytest.raises(ReplayError):
        list(replay(map(render, records)))
