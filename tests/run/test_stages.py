"""When stages start, restart and end; and the exit status of the run."""

import signal
from pathlib import Path
from typing import Any

import pytest

from swapd.run.commands import command_of
from swapd.run.file import StageSpec
from swapd.run.stages import (
    NEVER,
    PAUSE_MAX_S,
    WELL_AFTER_S,
    Action,
    Message,
    SignalStage,
    Stages,
    StartStage,
)

TERM = int(signal.SIGTERM)


def stage(name: str, **settings: Any) -> StageSpec:
    made = StageSpec(name, command_of(["x"]), {}, Path())
    return made._replace(**settings)


def stages(*all_of_them: StageSpec) -> Stages:
    return Stages({one.name: one for one in all_of_them})


def running(*all_of_them: StageSpec) -> Stages:
    """These stages, all started at 0 s."""
    made = stages(*all_of_them)
    made.begin()
    for one in all_of_them:
        made.started(one.name, 0.0)
    return made


def done(actions: list[Action]) -> list[Action]:
    """The actions without messages."""
    return [one for one in actions if not isinstance(one, Message)]


def said(actions: list[Action]) -> str:
    return "\n".join(one.text for one in actions if isinstance(one, Message))


# --- order of starts ---------------------------------------------------------------------


def test_one_that_ends_without_a_component_has_the_run_fail_if_another_waits_for_it() -> None:
    made = stages(stage("a", ready="registered"), stage("b", after=("a",)), stage("c"))
    made.begin()
    made.started("a", 0.0)
    made.started("c", 0.0)
    actions = made.ended("a", 0, 1.0)
    assert "a has registered no component, and b would wait for ever" in said(actions)
    assert done(actions) == [SignalStage("c", TERM)]
    made.ended("c", 0, 1.0)
    assert (made.over, made.status) == (True, NEVER)


def test_one_that_has_to_end_is_waited_for_until_it_ended_well() -> None:
    prepares = stage("a", ready="ended", restart="on-failure")
    made = stages(prepares, stage("b", after=("a",)))
    made.begin()
    assert made.started("a", 0.0) == []
    assert done(made.ended("a", 1, 1.0)) == []
    assert made.tick(2.0) == [StartStage("a")]
    made.started("a", 2.0)
    assert done(made.ended("a", 0, 3.0)) == [StartStage("b")]


# --- restarts ----------------------------------------------------------------------------


def test_the_pause_grows_to_a_bound_and_the_others_go_on() -> None:
    made = running(stage("a", restart="on-failure"), stage("b"))
    now, pauses = 0.0, []
    for _ in range(2000):
        actions = made.ended("a", 1, now)
        assert done(actions) == []
        assert made.due is not None
        pauses.append(made.due - now)
        now = made.due
        assert made.tick(now - 0.01) == []
        assert made.tick(now) == [StartStage("a")]
        made.started("a", now)
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, PAUSE_MAX_S]
    assert max(pauses) == PAUSE_MAX_S
    assert made.states["a"].starts == 2001


def test_a_first_pause_over_the_bound_is_every_pause() -> None:
    made = running(stage("a", restart="on-failure", backoff_s=300.0))
    for now in (0.0, 1000.0):
        assert "it starts again in 5 min" in said(made.ended("a", 1, now))
        assert made.due == now + 300.0
        made.tick(now + 300.0)
        made.started("a", now + 999.0)


def test_it_is_said_why_and_when_it_starts_again() -> None:
    made = running(stage("a", restart="on-failure", retries=3, backoff_s=0.5))
    text = "a ended with status 137 (SIGKILL): it starts again in 500 ms (retry 1 of 3)"
    assert made.ended("a", 137, 1.0) == [Message(text)]


def test_after_so_many_retries_it_has_failed() -> None:
    made = running(stage("a", restart="on-failure", retries=1), stage("b"))
    made.ended("a", 1, 1.0)
    made.tick(2.0)
    made.started("a", 2.0)
    assert done(made.ended("a", 4, 3.0)) == [SignalStage("b", TERM)]
    assert made.status == 4


def test_what_ran_for_long_has_all_its_retries_again() -> None:
    made = running(stage("a", restart="on-failure", retries=1))
    for round_ in range(1, 4):
        now = round_ * 2 * WELL_AFTER_S
        assert "retry 1 of 1" in said(made.ended("a", 1, now))
        assert made.tick(now + 1) == [StartStage("a")]
        made.started("a", now + 1)
    assert "retry" not in said(made.ended("a", 1, now + 2))


def test_one_that_cannot_be_started_again_uses_its_retries_up() -> None:
    made = running(stage("a", restart="on-failure", retries=1))
    made.ended("a", 1, 1e6)
    made.tick(1e6 + 1)
    assert done(made.ended("a", 127, 1e6 + 1)) == []
    assert (made.over, made.status) == (True, 127)


@pytest.mark.parametrize(
    ("restart", "status", "again"),
    [
        ("no", 0, False),
        ("no", 1, False),
        ("on-failure", 0, False),
        ("on-failure", 1, True),
        ("always", 0, True),
        ("always", 1, True),
    ],
)
def test_restart_says_which_ends_are_not_the_last(restart: str, status: int, again: bool) -> None:
    made = running(stage("a", restart=restart))
    made.ended("a", status, 1.0)
    assert made.over is not again


# --- the end -----------------------------------------------------------------------------


def test_a_failure_before_another_was_started_leaves_that_unstarted() -> None:
    made = stages(stage("a"), stage("b"))
    assert made.begin() == [StartStage("a"), StartStage("b")]
    made.ended("a", 127, 0.0)
    assert not made.is_starting("b")
    assert (made.over, made.status) == (True, 127)


def test_a_signal_ends_all_and_nothing_starts_again() -> None:
    made = running(stage("a", restart="always"), stage("b", restart="always"))
    made.ended("b", 1, 0.5)
    assert done(made.stop(2, 1.0)) == [SignalStage("a", 2)]
    assert done(made.ended("a", 130, 2.0)) == []
    assert (made.over, made.status) == (True, 130)


def test_one_that_does_not_end_in_its_time_is_killed_and_that_is_said() -> None:
    made = running(stage("a", stop_timeout_s=5.0), stage("b", stop_timeout_s=60.0))
    made.stop(TERM, 10.0)
    assert made.due == 15.0
    assert made.tick(14.9) == []
    actions = made.tick(15.0)
    assert done(actions) == [SignalStage("a", signal.SIGKILL)]
    assert "a has not ended in 5 s (stop_timeout)" in said(actions)
    assert made.due == 70.0
