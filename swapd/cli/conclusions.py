"""Conclusions from a status, in words, with the setting to change.

Pure. `swapd status`, `swapd top`, the page and (by `/metrics`) the alerts all use `conclusions`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from swapd.shared import vm
from swapd.shared.protocol import (
    WASTED_LAST,
    WASTED_S,
    ComponentStatus,
    Histogram,
    Status,
    WastedLoads,
    without_twins,
)
from swapd.shared.units import measured_loads, size

#: `thrashing`: loads are copied for most of the time; `swapping`: most uses wait for a load;
#: `never_fits`: acquires of a component are refused.
Kind = Literal["thrashing", "swapping", "never_fits"]

#: If the last WASTED_LAST wasted loads took longer, nothing is concluded from them.
LAST_S = 300.0
_MOST = 0.5
_NAMES, _CHARS = 3, 40
_MIB = 1 << 20


class Conclusion(msgspec.Struct, frozen=True):
    kind: Kind
    text: str


class Waits(msgspec.Struct, frozen=True):
    """Estimated waits: half of the acquires waited at most `p50_s`, 95 % at most `p95_s`."""

    p50_s: float
    p95_s: float


class StatusReport(Status, frozen=True, tag="status"):
    """A status as JSON shows it, with figures derived from it. None: nothing was measured yet."""

    conclusions: tuple[Conclusion, ...] = ()
    #: Waits of all acquires, as in `Waits`.
    wait_p50_s: float | None = None
    wait_p95_s: float | None = None
    #: Waits by component or family.
    waits_s: dict[str, Waits] = msgspec.field(default_factory=dict)
    load_bytes_per_s: float | None = None


def report(status: Status) -> StatusReport:
    waits = status.counts.wait_s if status.counts else Histogram((0.0,), [0, 0])
    measured = measured_loads(status.components)
    return StatusReport(
        **msgspec.structs.asdict(status),
        conclusions=conclusions(status),
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        waits_s=waits_of(status),
        load_bytes_per_s=measured and measured[0],
    )


def waits_of(status: Status) -> dict[str, Waits]:
    found: dict[str, Waits] = {}
    if status.counts is None:
        return found
    for name, tally in status.counts.of.items():
        if name and any(tally.waits):
            times = Histogram(status.counts.wait_s.bounds, tally.waits)
            found[name] = Waits(quantile(times, 0.5) or 0.0, quantile(times, 0.95) or 0.0)
    return found


def quantile(times: Histogram, share: float) -> float | None:
    """Estimate a quantile, in seconds, as Prometheus does. None without times."""
    rank, below = share * sum(times.counts), 0
    bounds = zip((0.0, *times.bounds), (*times.bounds, times.bounds[-1]), strict=True)
    for (low, high), count in zip(bounds, times.counts, strict=True):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return None


def conclusions(status: Status) -> tuple[Conclusion, ...]:
    """Return the problems in this status, with the setting to change; () if there are none.

    The time grows with the number of components. A daemon that was idle for WASTED_S has no
    conclusion about swaps.
    """
    found = (_of_swaps(status), _of_what_never_fits(status))
    return tuple(each for each in found if each is not None)


# --- swaps -------------------------------------------------------------------------------


class _Turn(NamedTuple):
    #: Names of all used components, or of their families, the largest first.
    names: list[str]
    swapped: list[str]
    #: Room for all of them: those that stay, plus the largest that leaves when it is released.
    need: int
    #: An alternating group with several swapped members, or "".
    group: str


def _of_swaps(status: Status) -> Conclusion | None:
    last = status.wasted
    if last is None or last.ago_s > WASTED_S or last.took_s > LAST_S:
        return None
    share = min(last.copying_s / last.took_s, 1.0) if last.took_s else 1.0
    if share <= _MOST and last.hits >= WASTED_LAST:
        return None
    turn = _in_turn(status, last)
    if not turn.swapped:
        return None
    often = f"{WASTED_LAST} swaps with {last.hits} hits" if last.hits else "each use is a swap"
    cost = f"{often}, and copies take {share:.0%} of the time"
    text = f"{_why(status, turn)}: {cost}; {_remedy(status, turn)}"
    return Conclusion("thrashing" if share > _MOST else "swapping", text)


def _in_turn(status: Status, last: WastedLoads) -> _Turn:
    since_s = max(last.ago_s + last.took_s, WASTED_S)
    used = [c for c in status.components if _is_used(c, since_s)]
    stay = sum(_room(status, c) for c in without_twins(used) if not _passes(c))
    swapped = [c for c in used if c.wasted]
    need = stay + max([_room(status, c) for c in used if _passes(c)], default=0)
    return _Turn(_sides(used), _sides(swapped), need, _shared_group(swapped))


def _shared_group(swapped: Iterable[ComponentStatus]) -> str:
    sides = {(c.group, c.part_of or c.name): None for c in swapped if c.group is not None}
    return next((group for group, n in Counter(group for group, _ in sides).items() if n > 1), "")


def _is_used(c: ComponentStatus, since_s: float) -> bool:
    stays = c.policy == "permanent" and c.inside
    return bool(stays or c.leases or (c.idle_s is not None and c.idle_s <= since_s))


def _passes(c: ComponentStatus) -> bool:
    """Tell whether it leaves at its release: such components use the same room in turn."""
    return c.policy == "sequential" and c.kind != "workspace"


def _why(status: Status, turn: _Turn) -> str:
    have = status.budget_bytes - status.quarantined_bytes
    if turn.need > have:
        return f"{_need(turn.names, turn.need)} in turn, and {size(have)} are there"
    if turn.group:
        group = f"the alternating group {_short(turn.group)}"
        return f"{_words(turn.swapped)} exclude each other, in {group}"
    return f"{_words(turn.swapped)} make room, though all fits: {size(turn.need)} of {size(have)}"


def _remedy(status: Status, turn: _Turn) -> str:
    have = status.budget_bytes - status.quarantined_bytes
    if turn.need <= have and not turn.group:
        return f"for workspaces, perhaps: swapd log {_short(turn.swapped[0])} says for what"
    words = ['policy="lru" in place of "alternating"'] if turn.group else []
    if turn.need > have:
        words.append(_budget(turn.need))
    said = f"{' and '.join(words)} would end it"
    most = status.budget_bytes + status.device_free_bytes
    if not status.device_bytes or turn.need <= most:
        return said
    return (
        f"{said}, and the device has {size(most)} for it: keep less of {_short(turn.names[0])} "
        "there (attach(blocks=...), then swapd resize)"
    )


# --- what never fits ---------------------------------------------------------------------


def _of_what_never_fits(status: Status) -> Conclusion | None:
    stays = [c for c in status.components if c.policy == "permanent"]
    kept = sum(_room(status, c) for c in stays)
    left = status.budget_bytes - kept
    over = _over(status, left)
    if not stays or not over:
        return None
    need = max(_room(status, c) for c in over)
    pinned = next(iter(_sides(c for c in stays if c.pinned)), "")
    less = f"swapd unpin {_short(pinned)}" if pinned else 'fewer of policy="permanent"'
    text = (
        f"{_need(_sides(over), need)} at once, and what stays "
        f"({_words(_sides(stays))}) leaves {size(max(left, 0))}: acquires are refused; {less}, or "
        f"{_budget(kept + need)}, would end it"
    )
    return Conclusion("never_fits", text)


def _over(status: Status, left: int) -> list[ComponentStatus]:
    others = [c for c in status.components if c.policy != "permanent" and c.kind != "workspace"]
    return [c for c in others if _room(status, c) > left]


# --- words -------------------------------------------------------------------------------


def _room(status: Status, c: ComponentStatus) -> int:
    return vm.round_up(c.nbytes, status.chunk_bytes)


def _sides(components: Iterable[ComponentStatus]) -> list[str]:
    sizes: dict[str, int] = {}
    for c in components:
        name = c.part_of or c.name
        sizes[name] = sizes.get(name, 0) + c.nbytes
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def _need(names: Sequence[str], nbytes: int) -> str:
    return f"{_words(names)} need{'s' if len(names) == 1 else ''} {size(nbytes)}"


def _words(names: Sequence[str]) -> str:
    said = [_short(name) for name in names[:_NAMES]]
    if len(names) > _NAMES:
        said.append(f"{len(names) - _NAMES} more")
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))


def _short(name: str) -> str:
    return name if len(name) <= _CHARS else f"{name[: _CHARS - 3]}..."


def _budget(nbytes: int) -> str:
    return f"a --budget of {-(-nbytes // _MIB)}MiB ($SWAPD_BUDGET)"
