"""When a stage has made enough for the next one, and which stages stay beside the largest."""

from types import SimpleNamespace
from typing import Any

import pytest

from swapd_client.errors import SessionEnded
from swapd_client.vllm.stage.keeping import StageKeeping
from swapd_client.vllm.stage.streaming import ChunkStreaming, staying

MIB = 1 << 20


class Daemon:
    """The status of a daemon: waiting sessions, and components."""

    def __init__(self) -> None:
        self.waits: set[str] = set()
        self.asked = 0
        self.gone = False
        self.session = SimpleNamespace(welcome=SimpleNamespace(session=1))
        self.sizes: dict[int, int] = {}
        self.stays: dict[int, int] = {}
        self.budget = 100 * MIB
        self.lends = False

    def status(self) -> Any:
        self.asked += 1
        if self.gone:
            raise SessionEnded("gone")
        said = [(f"{name}:7", 1) for name in self.waits] + [("code2wav:8", 0)]
        sessions = [
            SimpleNamespace(
                session=number, label=label, waiting=waiting, stays_bytes=self.stays.get(number, 0)
            )
            for number, (label, waiting) in enumerate(said, 1)
        ]
        parts = [
            SimpleNamespace(session=number, nbytes=nbytes, kind="component")
            for number, nbytes in self.sizes.items()
        ]
        if self.lends:
            parts.append(SimpleNamespace(session=9, nbytes=1 << 40, kind="workspace"))
        return SimpleNamespace(
            sessions=sessions, components=parts, chunk_bytes=2 * MIB, budget_bytes=self.budget
        )


class Sender:
    """A stage that sends chunks."""

    def __init__(self, after: tuple[str, ...] = ("talker",), chunks: int = 4) -> None:
        self.daemon = Daemon()
        self.sent: dict[str, int] = {}
        connection: Any = SimpleNamespace(client=self.daemon, stage="thinker")
        self.streaming = ChunkStreaming(connection, after, chunks)
        self.streaming.begin_with(lambda: dict(self.sent), receives=False)
        self.streaming.begin()


def test_it_has_enough_when_so_many_chunks_were_sent_in_this_turn() -> None:
    one = Sender()
    one.daemon.waits = {"talker"}
    one.sent = {"a": 3, "b": 3}
    assert not one.streaming.enough(), "of neither there is enough for a sound"
    one.sent = {"a": 3, "b": 4}
    assert one.streaming.enough()
    one.streaming.begin()
    assert not one.streaming.enough(), "these were of the turn before"


def test_a_later_turn_for_the_same_requests_is_twice_as_long() -> None:
    one = Sender()
    one.daemon.waits = {"talker"}
    one.sent = {"a": 4}
    assert one.streaming.enough()
    one.streaming.end(in_flight=True)
    one.streaming.begin()
    one.sent = {"a": 11}
    assert not one.streaming.enough()
    one.sent = {"a": 12}
    assert one.streaming.enough()
    one.streaming.end(in_flight=True)
    one.streaming.begin()
    one.sent = {"a": 27, "b": 3}
    assert not one.streaming.enough()
    one.sent = {"a": 20, "b": 4}
    assert one.streaming.enough(), "b is another"
    one.streaming.end(in_flight=False)
    one.streaming.begin()
    one.sent = {"a": 24, "b": 4}
    assert one.streaming.enough()


def test_a_request_that_has_ended_is_forgotten() -> None:
    one = Sender()
    one.daemon.waits = {"talker"}
    for number in range(9):
        one.sent = {f"{number}": 4}
        assert one.streaming.enough(), "it is the first turn for it"
        one.streaming.end(in_flight=True)
        one.sent = {}
        one.streaming.begin()
    assert len(one.streaming._enough) == 1


def test_it_does_not_give_way_so_early_to_who_does_nothing_with_its_chunks() -> None:
    one = Sender()
    one.daemon.waits = {"another"}
    one.sent = {"a": 4}
    assert not one.streaming.enough()
    asked = one.daemon.asked
    one.sent = {"a": 7}
    assert not one.streaming.enough()
    assert one.daemon.asked == asked, "it asks once for so many chunks"
    one.daemon.waits = {"talker"}
    one.sent = {"a": 8}
    assert one.streaming.enough()


def test_a_stage_that_does_not_know_the_next_one_gives_way_to_all() -> None:
    one = Sender(after=())
    one.sent = {"a": 4}
    assert one.streaming.enough()
    assert not one.daemon.asked


def test_chunks_of_requests_that_have_ended_do_not_count() -> None:
    one = Sender()
    one.sent = {"a": 3}
    one.streaming.begin()
    one.sent = {"b": 2}
    one.daemon.waits = {"talker"}
    assert not one.streaming.enough()


@pytest.mark.parametrize("chunks", [0, 4])
def test_a_stage_that_sends_none_or_is_to_finish_first_never_has_enough(chunks: int) -> None:
    one = Sender(chunks=chunks)
    one.daemon.waits = {"talker"}
    if chunks:
        connection: Any = SimpleNamespace(client=one.daemon, stage="thinker")
        one.streaming = ChunkStreaming(connection, ("talker",), chunks)
    one.streaming.begin()
    one.sent = {"a": 100}
    assert not one.streaming.enough()


def test_without_a_daemon_nobody_waits_and_nobody_stays() -> None:
    one = Sender()
    one.streaming.begin_with(lambda: dict(one.sent), receives=True)
    one.daemon.gone = True
    one.sent = {"a": 4}
    assert not one.streaming.enough()
    assert not one.streaming.stays(loaded=True)


def test_the_smallest_stay_as_many_as_fit_beside_the_largest() -> None:
    daemon = Daemon()
    daemon.lends = True
    daemon.sizes = {1: 60 * MIB, 2: 7 * MIB, 3: 30 * MIB, 4: 1}
    assert staying(daemon.status()) == {2, 3, 4}
    daemon.budget = 98 * MIB  # 7 MiB take four chunks, 8 MiB
    assert staying(daemon.status()) == {2, 4}
    daemon.budget = 60 * MIB
    assert staying(daemon.status()) == set()


def test_what_never_leaves_is_beside_those_that_stay() -> None:
    daemon = Daemon()
    daemon.waits = {"a", "b"}
    daemon.sizes = {1: 60 * MIB, 2: 50 * MIB, 3: 10 * MIB}
    assert staying(daemon.status()) == {3}
    daemon.stays = {2: 50 * MIB}
    daemon.budget = 110 * MIB
    assert staying(daemon.status()) == {2}, "it needs nothing more"
    daemon.budget = 120 * MIB
    assert staying(daemon.status()) == {2, 3}


def test_where_there_is_nothing_nobody_stays() -> None:
    assert staying(Daemon().status()) == set()


def test_only_who_goes_on_with_chunks_stays() -> None:
    one = Sender()
    one.daemon.sizes = {1: 10 * MIB, 2: 60 * MIB}
    assert not one.streaming.stays(loaded=True)
    one.streaming.begin_with(lambda: dict(one.sent), receives=True)
    assert one.streaming.stays(loaded=False)


def test_whether_it_stays_is_looked_at_again_when_it_had_to_come_in() -> None:
    one = Sender()
    one.streaming.begin_with(lambda: dict(one.sent), receives=True)
    one.daemon.sizes = {1: 10 * MIB, 2: 60 * MIB}
    assert one.streaming.stays(loaded=False)
    one.daemon.sizes[3] = 95 * MIB
    assert one.streaming.stays(loaded=False)
    assert one.daemon.asked == 1
    assert not one.streaming.stays(loaded=True)


def test_a_lease_is_not_kept_from_those_for_whom_enough_was_made() -> None:
    turn = StageKeeping(10.0)
    turn.note({"a"}, ())
    assert turn.keeps(1.0, wanted=True)
    assert not turn.keeps(2.0, wanted=True, enough=True)
    assert turn.keeps(2.0, wanted=False, enough=True)
    turn.whole = True
    assert turn.keeps(2.0, wanted=True, enough=True), "its cache would be dropped"


def test_who_stays_keeps_its_lease_between_requests_until_it_is_wanted() -> None:
    turn = StageKeeping(10.0)
    turn.stays = True
    assert turn.keeps(1.0, wanted=False)
    assert not turn.keeps(2.0, wanted=True)
    turn.whole = True
    assert not turn.keeps(3.0, wanted=True)


def test_who_stays_is_not_pushed_out_by_those_that_have_room_beside_it() -> None:
    one = Sender()
    daemon, streaming = one.daemon, one.streaming
    streaming.begin_with(dict, receives=True)
    daemon.sizes = {1: 10 * MIB, 2: 60 * MIB, 3: 50 * MIB}
    assert streaming.stays(loaded=True)
    asked = daemon.asked
    assert not streaming.stays_beside(wanted=False)
    assert streaming.stays_beside(wanted=True)
    assert streaming.stays_beside(wanted=True)
    assert daemon.asked == asked + 1, "it asks once as long as it is wanted"
    daemon.sizes[4] = 95 * MIB
    streaming.begin()
    assert not streaming.stays_beside(wanted=True), "who came meanwhile has none"


def test_who_stays_gives_way_to_memory_that_is_lent_as_such() -> None:
    one = Sender()
    one.daemon.lends = True
    one.streaming.begin_with(dict, receives=True)
    one.daemon.sizes = {1: 10 * MIB, 2: 60 * MIB}
    assert one.streaming.stays(loaded=True)
    assert not one.streaming.stays_beside(wanted=True)


def test_who_stays_beside_others_keeps_its_lease_for_a_bounded_time() -> None:
    turn = StageKeeping(10.0)
    turn.stays = True
    assert turn.keeps(1.0, wanted=True, computed=False, beside=True)
    turn.note({"a"}, ())
    assert turn.keeps(10.9, wanted=True, beside=True)
    assert not turn.keeps(11.0, wanted=True, beside=True)
    turn.over()
    assert turn.keeps(11.5, wanted=True, beside=True), "this is another turn"


def test_who_waits_for_chunks_goes_on_until_there_are_none() -> None:
    one = Sender().streaming
    assert not one.may_go_on(2, 0.0), "it goes on with none"
    one.begin_with(dict, receives=True)
    for _ in range(4):
        assert one.may_go_on(2, 0.0)
        one.looked(found=False)
    assert not one.may_go_on(2, 0.0), "twice for each request it was looked for one in vain"
    one.looked(found=True)
    assert one.may_go_on(1, 0.0)
    assert not one.may_go_on(0, 0.0), "it has no request"
    assert not one.may_go_on(1, 60.0), "nobody looks"


def test_a_server_that_streams_may_be_slow_to_step() -> None:
    one = Sender().streaming
    assert one.patience_s(1, 0.05) > 0.05
    assert one.patience_s(0, 0.05) == 0.05
    connection: Any = SimpleNamespace(client=Daemon(), stage="thinker")
    assert ChunkStreaming(connection, (), 4).patience_s(1, 0.05) == 0.05
