"""How a client joins the next daemon, in place of one that is gone.

A call that finds the daemon gone waits until no lease of the client is in use, so that no thread
computes on the old memory, and until no thread is about to finish a change that the daemon has
made. Then everything is registered again as it was, at its addresses, or nothing is: in a thread of
its own, where no interrupt comes between the steps. Of several threads one joins, and the others
wait.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from threading import get_ident
from typing import Protocol, TypeVar

from swapd.shared.system import start
from swapd_client.agents import this_thread
from swapd_client.cancellation import cancelled, stop_if_cancelled
from swapd_client.errors import (
    ClientClosed,
    DaemonGone,
    InvalidSource,
    NotRunning,
    SessionEnded,
    SwapdError,
    Timeout,
)
from swapd_client.leasing import Leasing
from swapd_client.registration import register_again
from swapd_client.session.channel import GRACE_S
from swapd_client.session.session import Session
from swapd_client.session.starting import AGAIN_S

T = TypeVar("T")

#: With `reconnect=0`, seconds that an attached model's call waits for leases of other threads,
#: which may wait for its own thread.
PATIENCE_S = 30.0
LOOK_S = 0.01
#: Seconds for the daemon's answer to the last try.
LAST_S = 1.0


class _Client(Protocol):
    leasing: Leasing
    joining: threading.Lock
    stays: bool
    reconnect_s: float

    def _join_next(self, error: SessionEnded, until: float | None = None) -> None: ...

    def _leasing_of(self, session: Session) -> Leasing: ...

    def _move_to(self, leasing: Leasing) -> None: ...


def repeated(client: _Client, call: Callable[[], T], timeout_s: object = None) -> T:
    """Return `call()`; if its daemon dies, repeat it with the next daemon.

    The call must change nothing if its daemon dies. `timeout_s` bounds the wait for a daemon, too.
    Raises as `call` and `Client._join_next`.
    """
    until = None
    while True:
        life = client.leasing.session.life
        try:
            return call()
        except DaemonGone as exc:
            if not life.is_over:  # the daemon is there, but did not send a file
                raise
            until = until or until_of(client, timeout_s)
            client._join_next(exc, until)


def until_of(client: _Client, timeout_s: object = None) -> float:
    """Return the time (monotonic) until which a call waits for a daemon."""
    bound_s = timeout_s if isinstance(timeout_s, (int, float)) else inf
    return time.monotonic() + max(0.0, min(client.reconnect_s, bound_s))


def join_next(client: _Client, error: SessionEnded, until: float) -> None:
    lost = client.leasing
    if lost.session.forked:
        lost.session.life.leave_to_parent()
        lost.session.check()
    if not lost.session.life.is_over:
        return  # another call was first
    may_wait = SessionEnded if not client.reconnect_s else (SessionEnded, type(None))
    if not isinstance(lost.session.error, may_wait):
        raise error  # the daemon is about to stop, or the client is closed
    _await_end(lost, error, until if client.reconnect_s else time.monotonic() + PATIENCE_S)
    problems: list[BaseException] = []
    done = threading.Event()
    #: Set when the call waits no longer for a daemon.
    over = cancelled.get() or threading.Event()
    threading.Thread(
        target=_join_if_first,
        args=(client, lost, until, over, problems, done),
        name="swapd-joins",
        daemon=True,
    ).start()
    try:
        done.wait()
    except BaseException:
        over.set()
        raise
    if problems:
        raise problems[0]


def stay(client: _Client) -> None:
    """Join no daemon any more, before closing. Blocks while one is being joined."""
    if not client.leasing.session.forked:  # else the lock may be the parent's
        client.stays = True  # first: this ends the wait for a daemon
        with client.joining:
            pass


def refuse_another_device(before: Session, now: Session) -> None:
    """Raise InvalidSource unless both daemons serve one device, so that tensors stay in place."""
    if (before.welcome.uuid, before.welcome.device) != (now.welcome.uuid, now.welcome.device):
        raise InvalidSource(
            f"swapd at {now.endpoint} serves {now.welcome.device}, but the weights are on "
            f"{before.welcome.device}: start one for that device"
        )


def _await_end(lost: Leasing, error: SessionEnded, until: float) -> None:
    """Block until the session has ended, no lease is in use, and no component is being changed.

    Raises `error` if this thread uses a lease or changes a component, or if time is over.
    """
    life = lost.session.life
    while life.error is None or lost.in_use() or life.changed_by():
        stop_if_cancelled()
        is_own = lost.cache.used(this_thread.number) or get_ident() in life.changed_by()
        if is_own or time.monotonic() > until:
            raise error
        time.sleep(LOOK_S)


def _join_if_first(
    client: _Client,
    lost: Leasing,
    until: float,
    over: threading.Event,
    problems: list[BaseException],
    done: threading.Event,
) -> None:
    is_first = False
    try:
        with client.joining:
            if is_first := client.leasing is lost:
                _join_in_time(client, lost, until, over)
    except SwapdError as exc:
        problems.append(exc if isinstance(exc, ClientClosed) else _explained(exc))
    except BaseException as exc:  # noqa: BLE001 - the caller raises it
        problems.append(exc)
    finally:
        del client  # the client may be collected once its caller goes on
        done.set()
    if is_first and not problems:
        lost.close()  # may wait for an event loop that uses its channels


def _explained(error: SwapdError) -> SwapdError:
    explained = type(error)(
        f"{error}. No weights are lost, and models stay attached: the next call tries again. "
        "client.close() makes all tensors private memory, and attached models ordinary ones"
    )
    explained.code, explained.__cause__ = error.code, error
    return explained


def _join_in_time(client: _Client, lost: Leasing, until: float, over: threading.Event) -> None:
    while not client.stays:
        left_s = until - time.monotonic()
        try:
            return _join(client, lost, max(left_s, LAST_S) if client.reconnect_s else inf)
        except (NotRunning, DaemonGone):  # no daemon yet, or it died, too
            if left_s <= 0 or over.is_set():
                raise
        over.wait(AGAIN_S)
    raise ClientClosed("this client is closed; connect again")


def _join(client: _Client, lost: Leasing, answer_s: float) -> None:
    old = lost.session
    session = old.again(answer_s)  # before anything changes: there may be no daemon
    session.again = old.again
    leasing = client._leasing_of(session)
    try:
        refuse_another_device(old, session)
        lost.giving_back.keep_no_more()
        old.leases.drain()
        old.leave()
        parts = [part for part in old.registry.all() if not part.where.over]
        families = {part.part_of for part in parts}
        kept = {name: size for name, size in old.registry.kept.items() if name in families}
        _answered(leasing, answer_s, partial(register_again, leasing, parts, kept))
    except BaseException:
        session.close()
        leasing.close()
        raise
    old.handed_over()
    client._move_to(leasing)


def _answered(leasing: Leasing, answer_s: float, register: Callable[[], object]) -> None:
    """Call `register()`, which takes as long as its copies do.

    From `answer_s` on, a daemon that is silent for GRACE_S ends the session. Raises then: Timeout.
    """
    session, done = leasing.session, threading.Event()

    def watch() -> None:
        wait_s = min(answer_s, PATIENCE_S)
        while not done.wait(wait_s):
            wait_s = LAST_S
            try:
                leasing.call(session.harmless(), GRACE_S)
            except Timeout as exc:
                return session.end(exc)
            except SwapdError:
                pass  # the session has ended, or no descriptor is free just now

    watcher = threading.Thread(target=watch, name="swapd-joins-watch", daemon=True)
    try:
        start(watcher)
        register()
    finally:
        done.set()
        if watcher.ident is not None:
            watcher.join()
    session.check()
