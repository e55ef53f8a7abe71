"""Finds threads of one process that wait for each other at two daemons.

Each daemon sees only the waits for its own device. So a thread that has waited for a while looks
for a thread that waits at another daemon and holds leases where this one waits. The daemon is asked
for the same on behalf of that holder, and refuses a deadlock if it does not fit beside the holder's
leases.
"""

import threading
from contextlib import suppress
from typing import NamedTuple

import msgspec

from swapd.shared import protocol
from swapd_client.errors import Deadlock, SwapdError
from swapd_client.lease_request import few
from swapd_client.leases.cache import Cache
from swapd_client.session.channel import Channel, ChannelFactory

#: A deadlock is refused at once.
PROBE_S = 0.001


class Wait(NamedTuple):
    """An acquire that a thread waits for, at one client."""

    factory: ChannelFactory
    cache: Cache
    request: protocol.Acquire | protocol.AcquireWorkspace
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' + '.join(map(repr, self.names))} at {self.factory.session.endpoint}"


#: Waits that have lasted for a while, by thread.
waits: dict[int, Wait] = {}


def look(mine: Wait) -> None:
    """Raise Deadlock if this wait and that of another thread can only end together.

    Called from time to time in the waiting thread.
    """
    me = threading.get_ident()
    waits[me] = mine
    for thread, other in waits.copy().items():
        if thread >= me or other.cache is mine.cache:
            # Of two threads one looks; both waits of one client are known to its daemon.
            continue
        theirs, ours = other.request.agent, mine.request.agent
        if _blocks(theirs, mine) and _blocks(ours, other) and waits.get(thread) == other:
            raise Deadlock(
                f"{mine} could never be granted: thread {thread} holds what it needs, and waits "
                f"for {other}, for which this thread, {me}, holds what it needs. Release before "
                "acquiring more, or acquire from the daemons in one order"
            )


def _blocks(holder: int, wait: Wait) -> bool:
    """Whether a wait can never end while this thread keeps its leases there."""
    if not (held := wait.cache.used(holder)):
        return False
    session = wait.factory.session
    number = session.next_id()
    probe = msgspec.structs.replace(
        wait.request, id=number, agent=holder, timeout_s=PROBE_S, holds=few(held), spare=()
    )
    with suppress(SwapdError):  # that session has ended, and its waits with it
        channel = Channel(wait.factory)
        reply = channel.call(probe, PROBE_S)
        if isinstance(reply, protocol.Refused):
            return reply.code == "deadlock"
        channel.send(protocol.Cancel(session.next_id(), number))
    return False
