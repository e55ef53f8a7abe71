"""Checks that a stage's components fit into a daemon's memory beside those of other stages."""

from collections.abc import Iterable

from swapd.shared import vm
from swapd.shared.protocol import Status
from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import TooLarge

MIB = 1 << 20


def lendable(status: Status) -> int:
    """Return the most bytes that a daemon can lend: not those that stay, or are quarantined."""
    stays = sum(one.stays_bytes for one in status.sessions)
    return max(status.budget_bytes - stays - status.quarantined_bytes, status.chunk_bytes)


def check_turn(client: Client, stage: str, sizes: Iterable[int], cache: int = 0) -> None:
    """Raise TooLarge unless a turn of the stage and a KV cache of `cache` bytes fit at once.

    `sizes`: bytes of each component that a turn holds. The turns of other stages must fit, too,
    beside components of this stage that stay.
    """
    status = client.status()
    mine = client.session.welcome.session
    stays = sum(one.stays_bytes for one in status.sessions if one.session == mine)
    weights = sum(vm.round_up(nbytes, status.chunk_bytes) for nbytes in sizes) - stays
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
        f"{size(room)}: give it a --budget of {_budget(status, need - room)} at least{less}, or "
        "have layers stream, with resident: auto in its additional_config.swapd"
    )


def check_others(status: Status, mine: int, stage: str) -> None:
    """Raise TooLarge if components of the stage that stay leave no room for another stage's turn.

    `mine`: its session. The daemon knows the size of a turn only of a stage that has had one.
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
        f"stage {stage!r} would stay, and leave {_name(largest.label)} no room for its turn. "
        f"Staying components ({sum_up}) and the turn of {_name(largest.label)} "
        f"({size(largest.turn_bytes)}) need {size(need)}, and swapd has a --budget of "
        f"{size(status.budget_bytes)}. Give it {_budget(status, need - status.budget_bytes)} at "
        f"least, or have {stage} take turns: leave cpu_offload_enabled and cpu_offload_components "
        "out of its additional_config.swapd"
    )


def _budget(status: Status, short: int) -> str:
    return f"{-(-(status.budget_bytes + short) // MIB)}MiB"


def _name(label: str) -> str:
    return label.rpartition(":")[0] or label
