"""The requests of both clients, before an agent sends them."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import inf
from numbers import Integral
from typing import Any

import msgspec

from swapd.shared import protocol
from swapd.shared.units import parse_size
from swapd_client.checks import A_SIZE, check, check_names, check_seconds, names_in
from swapd_client.errors import InvalidArgument
from swapd_client.leases.record import Record
from swapd_client.session.session import Session

#: Seconds after which a prefetch that found no room is dropped.
PREFETCH_TIMEOUT_S = 30.0

#: Leases in use; None means all.
Held = tuple[int, ...] | None


def nbytes_of(size: object) -> Any:
    """Return the bytes of an integer (numpy's, too) or a text ("6GiB"); other values as they are.

    Raises: InvalidArgument if the text is no size.
    """
    if isinstance(size, Integral) and not isinstance(size, bool):
        return int(size)
    try:
        return parse_size(size) if isinstance(size, str) else size
    except ValueError as exc:
        raise InvalidArgument(str(exc)) from None


Progress = Callable[[protocol.Forecast], None]


class LeaseRequest(msgspec.Struct, frozen=True):
    """An acquire, before a thread or task asks the daemon."""

    #: Makes the request, from its id, `agent`, and the agent's leases (`holds` and `spare`).
    request: Callable[..., protocol.AnyAcquire]
    names: tuple[str, ...]
    timeout_s: float | None
    #: Whether its holder waits for the copies by itself.
    early: bool = False
    progress: Progress | None = None
    is_workspace: bool = False


def of_components(
    session: Session,
    names: tuple[str, ...],
    timeout_s: float | None = None,
    priority: int = 0,
    await_registration: bool = False,
    early: bool = False,
    overtake: int | None = None,
    progress: Progress | None = None,
    deadline_s: float | None = None,
) -> LeaseRequest:
    check_names(names)
    check_seconds(timeout_s)
    check_seconds(deadline_s, "deadline", "the seconds from now within which it is wanted")
    # on a GPU the daemon does not wait for the copies: `bring_in` does
    at_once = early or session.processor.works_late
    request = partial(
        protocol.Acquire,
        names=names,
        timeout_s=timeout_s,
        priority=priority,
        await_registration=await_registration,
        early=at_once,
        overtake=overtake,
        due_s=deadline_s,
    )
    return LeaseRequest(request, names, timeout_s, early, progress)


def of_workspace(nbytes: int, said: object, timeout_s: float | None, priority: int) -> LeaseRequest:
    """Return a request for a workspace; messages give its size as `said`."""
    check("size", nbytes, int, A_SIZE)
    check_seconds(timeout_s)
    request = partial(
        protocol.AcquireWorkspace, nbytes=nbytes, timeout_s=timeout_s, priority=priority
    )
    return LeaseRequest(request, (f"workspace of {said}",), timeout_s, is_workspace=True)


def of_start(timeout_s: float | None) -> LeaseRequest:
    check_seconds(timeout_s)

    def request(number: int, **_: object) -> protocol.AcquireStart:
        return protocol.AcquireStart(number, timeout_s)

    return LeaseRequest(request, (protocol.THE_START,), timeout_s)


def each_once(argument: str, names: str | Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(names_in(argument, names))


def cheapest_first(forecasts: Iterable[protocol.Forecast]) -> list[protocol.Forecast]:
    """Sort by the present cost: holders to wait for, then time, then bytes."""

    def cost(one: protocol.Forecast) -> tuple[bool, float, int]:
        nbytes = one.bytes_in + one.bytes_coming + one.bytes_back
        return not one.at_once, inf if one.seconds is None else one.seconds, nbytes

    return sorted(forecasts, key=cost)


def record_of(session: Session, number: int, asked: LeaseRequest, agent: int) -> Record:
    late = asked.is_workspace or session.processor.works_late
    return Record(
        number, asked.names, agent, is_workspace=asked.is_workspace, ends_at_once=not late
    )


def granted(
    session: Session, record: Record, reply: protocol.AnyReply, asked: LeaseRequest
) -> Callable[[], None]:
    """Note the grant of a lease; return the call that makes its components accessible.

    That call blocks for the copies, unless `asked.early`. Raises the error of a refusal.
    """
    grant = session.unwrap(reply)
    assert isinstance(grant, protocol.Granted)
    record.granted = grant
    session.leases.add(record)
    if asked.early:
        return partial(session.leases.show, record)
    return partial(session.leases.bring_in, record, asked.timeout_s)


def prefetch_of(
    number: int,
    names: tuple[str, ...],
    over: Collection[str] | None,
    timeout_s: float | None = None,
) -> protocol.Prefetch:
    others = None if over is None else tuple(each_once("over", over))
    check_seconds(timeout_s)
    return protocol.Prefetch(number, names, others, timeout_s)


def few(holds: tuple[int, ...]) -> Held:
    """Return None, which means all, if there are too many for a message."""
    return holds if len(holds) <= protocol.LEASES_MAX else None


def agent_ahead(request: int) -> int:
    """Return the agent of a request ahead; no thread has this number."""
    return -request
