"""When a stage keeps its lease: turns, by what came, what went, and the time."""

from swapd_client.leases.keeping import StageKeeping


def made(*came: str, finish_within_s: float = 10.0) -> StageKeeping:
    turns = StageKeeping(finish_within_s)
    turns.note(came, ())
    return turns


def test_a_lease_that_nobody_wants_is_kept_while_requests_are_in_flight() -> None:
    turns = made("a", "b")
    assert turns.keeps(1.0, wanted=False)
    turns.note((), {"a"})
    assert turns.keeps(1e6, wanted=False)
    turns.note((), {"b"})
    assert not turns.keeps(1e6, wanted=False)


def test_a_wanted_lease_is_kept_until_what_was_in_flight_then_has_finished() -> None:
    turns = made("a", "b")
    assert turns.keeps(1.0, wanted=True)
    turns.note(("c",), {"a"})
    assert turns.keeps(2.0, wanted=True)
    turns.note((), {"b"})
    assert not turns.keeps(3.0, wanted=True), "c came when the lease was wanted already"
    assert turns.in_flight == {"c"}


def test_requests_that_take_too_long_are_interrupted() -> None:
    turns = made("a", finish_within_s=2.0)
    assert turns.keeps(1.0, wanted=True)
    assert turns.keeps(2.9, wanted=True)
    assert not turns.keeps(3.0, wanted=True)


def test_a_step_that_computed_nothing_gives_way_at_once_if_the_lease_is_wanted() -> None:
    turns = made("a")
    assert turns.keeps(1.0, wanted=False, computed=False)
    assert not turns.keeps(1.0, wanted=True, computed=False)


def test_with_no_time_to_finish_a_stage_gives_way_at_each_step() -> None:
    assert not made("a", finish_within_s=0.0).keeps(1.0, wanted=True)


def test_who_no_longer_waits_is_forgotten() -> None:
    turns = made("a", finish_within_s=2.0)
    assert turns.keeps(1.0, wanted=True)
    assert turns.keeps(2.0, wanted=False)
    turns.note(("b",), ())
    assert turns.keeps(9.0, wanted=True), "this is another who waits"
    turns.note((), {"a"})
    assert turns.keeps(10.0, wanted=True), "b was in flight when that one came"


def test_a_turn_that_is_over_says_how_many_requests_finished_in_it() -> None:
    turns = made("a", "b")
    turns.note((), {"a", "unknown"})
    assert turns.over() == 1
    turns.note((), {"b"})
    assert turns.over() == 1
    assert turns.over() == 0


def test_after_a_turn_the_next_to_wait_waits_for_what_is_in_flight_then() -> None:
    turns = made("a", finish_within_s=2.0)
    assert turns.keeps(1.0, wanted=True)
    turns.over()
    assert turns.keeps(50.0, wanted=True)


def test_a_request_that_is_preempted_and_scheduled_again_is_one() -> None:
    turns = made("a")
    turns.note(("a",), ())
    turns.note((), {"a"})
    assert not turns.in_flight
    assert turns.over() == 1
