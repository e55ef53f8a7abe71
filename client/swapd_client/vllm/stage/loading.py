"""The memory that a stage loads in: lent by the daemon as a workspace, until the weights move.

Plain functions: nothing is remembered. When a stage may ask for it is said by `stage.py`.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event

from swapd.shared import vm
from swapd.shared.protocol import StatusReply
from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import ClientClosed, SessionEnded, TooLarge
from swapd_client.lease import Lease

log = logging.getLogger("swapd_client")

MIB = 1 << 20

#: How long to wait for swapd to have back what it lent for loading, and how often to ask.
RETURN_S = 10.0
RETURN_STEP_S = 0.02


def workspace(client: Client, stage: str, nbytes: int | None) -> Lease:
    """`nbytes` of device memory, or as much as the daemon can lend: if that is less, or for None.

    Blocks until others have given way. Raises as `Client.acquire_workspace`.
    """
    most = lendable(client.status())
    nbytes = most if nbytes is None else min(nbytes, most)
    try:
        lease = client.acquire_workspace(nbytes)
    except TooLarge as exc:
        raise TooLarge(
            f"stage {stage!r} cannot have {size(nbytes)} to load its weights: {exc}. Give "
            "swapd a larger --budget, or the stage a smaller load_workspace"
        ) from exc
    log.info("%s loads, with %s of swapd's memory", stage, size(nbytes))
    return lease


@contextmanager
def alone(client: Client) -> Iterator[None]:
    """While in it no other stage starts: none measures the device while memory of it is lent.

    Not with a lease. Blocks until those that start have started. Raises as `Client.acquire_start`.
    """
    turn = client.acquire_start()
    try:
        yield
    finally:
        with suppress(SessionEnded, ClientClosed):  # the daemon is gone, and with it the turn
            turn.release()


def await_return(client: Client, stage: str, closed: Event) -> None:
    """Until the driver has given swapd back what was lent; at most RETURN_S, or until `closed`."""
    mine = client.session.welcome.session
    until = time.monotonic() + RETURN_S
    with suppress(SessionEnded, ClientClosed):  # the next acquire says so
        while _lends(status := client.status(), mine):
            if time.monotonic() > until:
                log.warning(
                    "%s has loaded, and swapd has not got back what it lent for that: vLLM may "
                    "count it as free. %s",
                    stage,
                    "; ".join(status.notes),
                )
                return
            closed.wait(RETURN_STEP_S)


def lendable(status: StatusReply) -> int:
    """How many bytes a daemon can lend at most: all but what never leaves, in or still to come."""
    stays = sum(one.stays_bytes for one in status.sessions)
    return max(status.budget_bytes - stays - status.quarantined_bytes, status.chunk_bytes)


def check_turn(client: Client, stage: str, cache: int = 0) -> None:
    """Raise TooLarge unless all the stage has registered, and a KV cache of `cache` bytes, fits.

    The arena has to hold at once what one step needs; and what others need, beside what stays.
    """
    status = client.status()
    mine = client.session.welcome.session
    weights = sum(
        vm.round_up(part.nbytes, status.chunk_bytes)
        for part in status.components
        if part.session == mine and part.kind != "workspace"
    ) - sum(one.stays_bytes for one in status.sessions if one.session == mine)
    room, need = lendable(status), weights + vm.round_up(cache, status.chunk_bytes)
    if need <= room:
        return check_others(status, mine, stage)
    less = ""
    if cache and weights < room:
        less = f", or this stage a kv_cache_memory_bytes of {room - weights} at most"
    beside = f" and its KV cache of {size(cache)}" if cache else ""
    raise TooLarge(
        f"stage {stage!r} needs its weights of {size(weights)}{beside} at once, {size(need)} in "
        f"chunks of {size(status.chunk_bytes)}, and swapd at {client.session.endpoint} can lend "
        f"{size(room)}: give it a --budget of {_budget(status, need - room)} at least{less}"
    )


def check_others(status: StatusReply, mine: int, stage: str) -> None:
    """Raise TooLarge if what of the stage stays takes the room of another one's turn.

    `mine`: its session, which has registered all of it. What another needs at once the daemon
    knows by its leases: so a stage that has started has had its turn once.
    """
    sessions = {one.session: one for one in status.sessions}
    me = sessions.pop(mine, None)
    largest = max(sessions.values(), key=lambda one: one.turn_bytes, default=None)
    if me is None or not me.stays_bytes or largest is None:
        return
    stay = [(_name(one.label), one.stays_bytes) for one in sessions.values() if one.stays_bytes]
    stay.append((stage, me.stays_bytes))
    need = sum(nbytes for _, nbytes in stay) + largest.turn_bytes
    if need <= status.budget_bytes:
        return
    sum_up = " + ".join(f"{size(nbytes)} of {name}" for name, nbytes in stay)
    raise TooLarge(
        f"stage {stage!r} would stay, and leave {_name(largest.label)} no room for its turn: what "
        f"stays ({sum_up}) and what {_name(largest.label)} needs at once "
        f"({size(largest.turn_bytes)}) are {size(need)}, and swapd has a --budget of "
        f"{size(status.budget_bytes)}: give it {_budget(status, need - status.budget_bytes)} at "
        f"least, or have {stage} take turns: leave cpu_offload_enabled and cpu_offload_components "
        "out of its additional_config.swapd"
    )


def _budget(status: StatusReply, short: int) -> str:
    """The least `--budget` that is so much more."""
    return f"{-(-(status.budget_bytes + short) // MIB)}MiB"


def _name(label: str) -> str:
    """What a session's stage is called."""
    return label.rpartition(":")[0] or label


def _lends(status: StatusReply, session: int) -> bool:
    """Whether memory is lent to a session, or on its way back."""
    return any(c.session == session and c.kind == "workspace" for c in status.components)
