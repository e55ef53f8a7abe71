"""How long a stage keeps its lease: until its requests end, others wait, or time is over."""

from swapd_client.vllm.stage.keeping import StageKeeping


def made(*came: str, finish_within_s: float = 10.0, slice_s: float | None = None) -> StageKeeping:
    turn = StageKeeping(finish_within_s, slice_s)
    turn.note(came, ())
    return turn


def test_a_wanted_lease_is_kept_until_what_was_in_flight_then_has_finished() -> None:
    turn = made("a", "b")
    assert turn.keeps(0.0, wanted=False)
    assert turn.keeps(1.0, wanted=True)
    turn.note(("c",), {"a"})
    assert turn.keeps(2.0, wanted=True)
    turn.note((), {"b"})
    assert not turn.keeps(3.0, wanted=True), "c came when the lease was wanted already"
    assert turn.keeps(1e6, wanted=False)


def test_requests_that_take_too_long_are_interrupted_and_a_new_waiter_waits_anew() -> None:
    turn = made("a", finish_within_s=2.0)
    assert turn.keeps(1.0, wanted=True)
    assert not turn.keeps(3.0, wanted=True)
    assert turn.keeps(4.0, wanted=False)
    assert turn.keeps(9.0, wanted=True), "this is another who waits"
    turn.note(("b",), {"a"})
    turn.begin(50.0)
    assert turn.keeps(50.0, wanted=True), "and this is another turn"
    assert not made("a", finish_within_s=0.0).keeps(1.0, wanted=True)


def test_a_step_without_work_and_enough_for_who_waits_end_a_turn_that_is_wanted() -> None:
    turn = made("a")
    for how in ({"computed": False}, {"enough": True}):
        assert turn.keeps(1.0, wanted=False, **how)
        assert not turn.keeps(1.0, wanted=True, **how)
    turn.whole = True
    assert turn.keeps(2.0, wanted=True, enough=True), "its cache would be dropped"


def test_who_stays_keeps_its_lease_between_requests_and_beside_others_for_a_bounded_time() -> None:
    turn = made()
    turn.stays = True
    assert turn.keeps(1.0, wanted=False)
    assert not turn.keeps(2.0, wanted=True)
    turn.begin(3.0)
    assert turn.keeps(3.0, wanted=True, computed=False, beside=True)
    turn.note({"a"}, ())
    assert turn.keeps(12.9, wanted=True, beside=True)
    assert not turn.keeps(13.0, wanted=True, beside=True)


def test_a_turn_that_is_over_says_how_many_requests_finished_in_it() -> None:
    turn = made("a", "b")
    turn.note(("a",), {"unknown"})  # it was preempted, and scheduled again
    turn.note((), {"a"})
    assert turn.in_flight == {"b"}
    assert [turn.over(), turn.over()] == [1, 0]


def test_a_slice_ends_inside_requests_when_the_turn_has_lasted_so_long() -> None:
    turn = made("a", slice_s=2.0)
    turn.begin(100.0)
    assert not turn.keeps(100.1, wanted=True, computed=False)
    turn.note(("b",), {"a"})
    assert turn.keeps(101.9, wanted=True), "b came when the lease was wanted already"
    assert not turn.keeps(102.0, wanted=True)
    assert turn.keeps(150.0, wanted=False), "nobody waits"
    turn.begin(200.0)
    assert turn.keeps(201.0, wanted=True)
