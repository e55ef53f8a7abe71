"""When a stage has made enough for the next one, and which stages stay beside the largest.

`tests/vllm/test_streaming.py` has stages of vllm-omni that do so.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from swapd.shared.config import STAGE_VARIABLE
from swapd_client.errors import SessionEnded
from swapd_client.vllm.stage.connection import stage_in
from swapd_client.vllm.stage.streaming import ChunkStreaming, staying
from tests.plugin.test_stage import Scene

MIB = 1 << 20


class Sender:
    """A stage that sends chunks, and its daemon: sessions that wait, and the bytes of each."""

    def __init__(self, after: tuple[str, ...] = ("talker",), *, receives: bool = False) -> None:
        self.waits: tuple[str, ...] = ()
        self.asked = 0
        self.gone = False
        self.sizes: dict[int, int] = {}
        self.stays: dict[int, int] = {}
        self.budget = 100 * MIB
        self.lends = False
        self.sent: dict[str, int] = {}
        self.session = SimpleNamespace(welcome=SimpleNamespace(session=1))
        connection: Any = SimpleNamespace(client=self)
        self.streaming = ChunkStreaming(connection, after, 4)
        self.streaming.begin_with(lambda: dict(self.sent), receives=receives)
        self.streaming.begin()

    def status(self) -> Any:
        self.asked += 1
        if self.gone:
            raise SessionEnded("gone")
        labels = [*((name, 1) for name in self.waits), ("code2wav", 0)]
        sessions = [
            SimpleNamespace(
                session=n,
                label=f"{name}:7",
                waiting=waits,
                stays_bytes=self.stays.get(n, 0),
                turn_bytes=0,
            )
            for n, (name, waits) in enumerate(labels, 1)
        ]
        parts = [
            SimpleNamespace(session=n, nbytes=nbytes, kind="component", part_of="")
            for n, nbytes in self.sizes.items()
        ]
        if self.lends:
            parts.append(SimpleNamespace(session=9, nbytes=1 << 40, kind="workspace", part_of=""))
        return SimpleNamespace(
            sessions=sessions, components=parts, chunk_bytes=2 * MIB, budget_bytes=self.budget
        )


def test_turns_for_one_request_double_and_those_for_another_do_not() -> None:
    one = Sender()
    one.waits = ("talker",)
    for sent, enough in (
        ({"a": 3, "b": 3}, False),
        ({"a": 4, "b": 3}, True),
        ({"a": 11, "b": 3}, False),  # these were of the turn before
        ({"a": 12, "b": 3}, True),
        ({"a": 20, "b": 7}, True),
    ):
        one.sent = sent
        assert one.streaming.enough() == enough, sent
        if enough:
            one.streaming.end(in_flight=True)
            one.streaming.begin()
    one.streaming.end(in_flight=False)
    one.sent = {"a": 24, "b": 7}
    assert one.streaming.enough()


def test_it_does_not_give_way_so_early_to_who_does_nothing_with_its_chunks() -> None:
    one = Sender()
    one.waits = ("another",)
    one.sent = {"a": 4}
    assert not one.streaming.enough()
    one.sent = {"a": 7}
    assert not one.streaming.enough()
    assert one.asked == 1, "it asks once for so many chunks"
    one.waits = ("talker",)
    one.sent = {"a": 8}
    assert one.streaming.enough()
    assert Sender(after=()).streaming._next_waits(), "without a known next one, to all"


@pytest.mark.parametrize("waits", ["omni/talker", "talker.tp1", "omni/talker.tp1"])
def test_the_next_stage_may_have_ranks_and_be_in_a_run_of_stages(waits: str) -> None:
    one = Sender()
    one.waits = (waits,)
    one.sent = {"a": 4}
    assert one.streaming.enough()


def test_the_label_of_a_session_tells_its_stage(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.connect("code2wav")
    monkeypatch.setenv(STAGE_VARIABLE, "omni")
    scene.connect("thinker.tp1")
    labels = [one.label for one in scene.daemon.status().sessions]
    assert {"code2wav", "thinker"} <= set(map(stage_in, labels)), labels


def test_without_a_daemon_nobody_waits_and_nobody_stays() -> None:
    one = Sender(receives=True)
    one.gone = True
    one.sent = {"a": 4}
    assert not one.streaming.enough()
    assert not one.streaming.stays(loaded=True)


@pytest.mark.parametrize(
    ("sizes", "stays", "budget", "found"),
    [
        ((60 * MIB, 7 * MIB, 30 * MIB, 1), {}, 100, {2, 3, 4}),
        ((60 * MIB, 7 * MIB, 30 * MIB, 1), {}, 98, {2, 4}),  # 7 MiB take four chunks, 8 MiB
        ((60 * MIB, 7 * MIB, 30 * MIB, 1), {}, 60, set()),
        ((60 * MIB, 50 * MIB, 10 * MIB), {}, 100, {3}),
        ((60 * MIB, 50 * MIB, 10 * MIB), {2: 50 * MIB}, 110, {2}),  # it needs nothing more
        ((60 * MIB, 50 * MIB, 10 * MIB), {2: 50 * MIB}, 120, {2, 3}),
        ((), {}, 100, set()),
    ],
)
def test_the_smallest_stay_as_many_as_fit_beside_the_largest(
    sizes: tuple[int, ...], stays: dict[int, int], budget: int, found: set[int]
) -> None:
    one = Sender()
    one.waits, one.lends = ("a", "b"), True
    one.sizes, one.stays, one.budget = dict(enumerate(sizes, 1)), stays, budget * MIB
    assert staying(one.status()) == found


def test_who_stays_is_not_pushed_out_by_those_that_have_room_beside_it() -> None:
    sizes = {1: 10 * MIB, 2: 60 * MIB, 3: 50 * MIB}
    first, one = Sender(), Sender(receives=True)
    first.sizes = one.sizes = sizes
    assert not first.streaming.stays(loaded=True), "it consumes no chunks"
    assert one.streaming.stays(loaded=True)
    assert not one.streaming.stays_beside(wanted=False)
    for _ in range(2):
        assert one.streaming.stays_beside(wanted=True)
    assert one.asked == 2, "it asks once as long as it is wanted"
    one.lends = True
    one.streaming.begin()
    assert not one.streaming.stays_beside(wanted=True), "memory is lent as such"
    one.lends, sizes[4] = False, 95 * MIB
    one.streaming.begin()
    assert not one.streaming.stays_beside(wanted=True), "who came meanwhile has none"
    assert one.streaming.stays(loaded=False), "it is looked at again when it had to come in"
    assert not one.streaming.stays(loaded=True)


def test_who_waits_for_chunks_goes_on_until_there_are_none() -> None:
    assert not Sender().streaming.may_go_on(2, 0.0), "it goes on with none"
    one = Sender(receives=True).streaming
    for _ in range(4):
        assert one.may_go_on(2, 0.0)
        one.looked(found=False)
    assert not one.may_go_on(2, 0.0), "twice for each request it was looked for one in vain"
    one.looked(found=True)
    assert one.may_go_on(1, 0.0)
    assert not one.may_go_on(0, 0.0), "it has no request"
    assert not one.may_go_on(1, 60.0), "nobody looks"
    assert one.patience_s(1, 0.05) > one.patience_s(0, 0.05) == 0.05


def test_a_rank_of_a_pipeline_waits_while_its_requests_are_in_other_ranks() -> None:
    one = Sender().streaming
    one.in_pipeline = True
    assert one.may_go_on(2, 0.0) > one.may_go_on(0, 0.0)
    assert one.patience_s(1, 0.05) > one.patience_s(0, 0.05) == 0.05
