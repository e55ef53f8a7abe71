"""A thread that holds no lease counts as a new holder: leases still ending are not its own."""

from swapd_client.leases.agents import Agent, Agents

ME, YOU = 100, 200


def take(agents: Agents, who: int = ME) -> Agent:
    agent = agents.of(who)
    agents.took(agent)
    return agent


def test_who_holds_a_lease_is_who_it_was() -> None:
    agents = Agents()
    agent = take(agents)
    assert agents.of(ME) is agent
    take(agents)
    agents.released(agent, late=False)
    assert agents.of(ME) is agent


def test_who_holds_nothing_is_somebody_new() -> None:
    agents = Agents()
    first = take(agents)
    agents.released(first, late=True)
    second = take(agents)
    assert second.number != first.number
    agents.ended(first)
    assert agents.of(ME) is second


def test_two_threads_are_two() -> None:
    agents = Agents()
    assert take(agents, ME).number != take(agents, YOU).number


def test_nobody_is_remembered_who_was_granted_nothing() -> None:
    agents = Agents()
    for who in range(100):
        agents.of(who)
        agent = take(agents, who)
        agents.released(agent, late=bool(who % 2))
        if who % 2:
            agents.ended(agent)
    assert not agents


def test_what_is_ending_is_known_of_who_holds_another() -> None:
    agents = Agents()
    agent = take(agents)
    take(agents)
    agents.released(agent, late=True)
    assert agents.of(ME).ending == 1
    assert agents.of(YOU).ending == 0
    agents.ended(agent)
    assert agents.of(ME) is agent
    assert not agent.ending
