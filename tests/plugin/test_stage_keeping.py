"""How long a stage keeps its lease: until its requests end, others wait, or time is over."""

from swapd_client.vllm.stage.keeping import StageKeeping


def made(*came: str, finish_within_s: float = 10.0, slice_s: float | None = None) -> StageKeeping:
    turn = StageKeeping(finish_within_s, slice_s)
    turn.note(came, ())
    return turn


def test_a_lease_that_nobody_wants_is_kept_while_requests_are_in_flight() -> None:
    turn = made("a", "b")
    assert turn.keeps(1.0, wanted=False)
    turn.note((), {"a"})
    assert turn.keeps(1e6, wanted=False)
    turn.note((), {"b"})
    assert not turn.keeps(1e6, wanted=False)


def test_a_wanted_lease_is_kept_until_what_was_in_flight_then_has_finished() -> None:
    turn = made("a", "b")
    assert turn.keeps(1.0, wanted=True)
    turn.note(("c",), {"a"})
    assert turn.keeps(2.0, wanted=True)
    turn.note((), {"b"})
    assert not turn.keeps(3.0, wanted=True), "c came when the lease was wanted already"
    assert turn.in_flight == {"c"}


def test_requests_that_take_too_long_are_interrupted() -> None:
    turn = made("a", finish_within_s=2.0)
    assert turn.keeps(1.0, wanted=True)
    assert turn.keeps(2.9, wanted=True)
    assert not turn.keeps(3.0, wanted=True)


def test_a_step_that_computed_nothing_gives_way_at_once_if_the_lease_is_wanted() -> None:
    turn = made("a")
    assert turn.keeps(1.0, wanted=False, computed=False)
    assert not turn.keeps(1.0, wanted=True, computed=False)


def test_with_no_time_to_finish_a_stage_gives_way_at_each_step() -> None:
    assert not made("a", finish_within_s=0.0).keeps(1.0, wanted=True)


def test_who_no_longer_waits_is_forgotten() -> None:
    turn = made("a", finish_within_s=2.0)
    assert turn.keeps(1.0, wanted=True)
    assert turn.keeps(2.0, wanted=False)
    turn.note(("b",), ())
    assert turn.keeps(9.0, wanted=True), "this is another who waits"
    turn.note((), {"a"})
    assert turn.keeps(10.0, wanted=True), "b was in flight when that one came"


def test_a_turn_that_is_over_says_how_many_requests_finished_in_it() -> None:
    turn = made("a", "b")
    turn.note((), {"a", "unknown"})
    assert turn.over() == 1
    turn.note((), {"b"})
    assert turn.over() == 1
    assert turn.over() == 0


def test_after_a_turn_the_next_to_wait_waits_for_what_is_in_flight_then() -> None:
    turn = made("a", finish_within_s=2.0)
    assert turn.keeps(1.0, wanted=True)
    turn.over()
    assert turn.keeps(50.0, wanted=True)


def test_a_request_that_is_preempted_and_scheduled_again_is_one() -> None:
    turn = made("a")
    turn.note(("a",), ())
    turn.note((), {"a"})
    assert not turn.in_flight
    assert turn.over() == 1


def test_a_slice_ends_inside_requests_when_the_turn_has_lasted_so_long() -> None:
    turn = made("a", slice_s=2.0)
    turn.begin(100.0)
    assert turn.keeps(100.5, wanted=True)
    turn.note(("b",), {"a"})
    assert turn.keeps(101.9, wanted=True), "b came when the lease was wanted already"
    assert not turn.keeps(102.0, wanted=True)
    assert turn.in_flight == {"b"}


def test_a_slice_is_counted_from_when_the_turn_began_not_from_when_somebody_waits() -> None:
    turn = made("a", slice_s=2.0)
    turn.begin(100.0)
    assert turn.keeps(150.0, wanted=False), "nobody waits"
    assert not turn.keeps(150.1, wanted=True)
    turn.over()
    turn.begin(200.0)
    assert turn.keeps(201.0, wanted=True)


def test_a_slice_ends_at_once_where_there_is_nothing_to_compute() -> None:
    turn = made("a", slice_s=2.0)
    turn.begin(100.0)
    assert not turn.keeps(100.1, wanted=True, computed=False)
    turn.note((), {"a"})
    assert not turn.keeps(100.2, wanted=True)
    assert not turn.keeps(100.2, wanted=False)
