"""A thread that holds nothing is somebody new: what is still ending is no longer held by it."""

import threading

import pytest

from swapd_client.errors import AcquireTimeout
from swapd_client.leases.agents import Agent, Agents

ME, YOU = 100, 200


def take(agents: Agents, lease: int, who: int = ME) -> Agent:
    agent = agents.enter(who)
    agents.took(agent, lease)
    return agent


def test_who_holds_a_lease_is_who_it_was() -> None:
    agents = Agents()
    agent = take(agents, 1)
    assert agents.enter(ME) is agent
    take(agents, 2)
    agents.released(2, ended=True)
    assert agents.enter(ME) is agent


def test_who_holds_nothing_is_somebody_new() -> None:
    agents = Agents()
    first = take(agents, 1)
    agents.released(1, ended=False)
    second = take(agents, 2)
    assert second.number != first.number
    agents.ended(1)
    assert agents.enter(ME) is second


def test_two_threads_are_two() -> None:
    agents = Agents()
    assert take(agents, 1, ME).number != take(agents, 2, YOU).number


def test_nobody_is_remembered_who_was_granted_nothing() -> None:
    agents = Agents()
    for who in range(100):
        agents.enter(who)
        take(agents, who, who)
        agents.released(who, ended=bool(who % 2))
        agents.ended(who)
    assert not agents._holding
    assert not agents._of


def test_who_holds_another_lease_waits_for_what_is_ending() -> None:
    agents = Agents()
    agent = take(agents, 1)
    take(agents, 2)
    agents.released(2, ended=False)
    assert agents.must_wait(ME)
    assert not agents.must_wait(YOU)
    with pytest.raises(AcquireTimeout, match="does not end"):
        agents.enter(ME, 0.0)
    entered: list[Agent] = []
    waiting = threading.Thread(target=lambda: entered.append(agents.enter(ME)))
    waiting.start()
    agents.ended(2)
    waiting.join()
    assert entered == [agent]


def test_another_thread_may_release_it() -> None:
    agents = Agents()
    first = take(agents, 1, ME)
    releasing = threading.Thread(target=agents.released, args=(1,), kwargs={"ended": True})
    releasing.start()
    releasing.join()
    assert agents.enter(ME) is not first


def test_what_is_said_of_unknown_leases_is_ignored() -> None:
    agents = Agents()
    agents.released(1, ended=True)
    agents.ended(1)
    assert not agents.must_wait(ME)
