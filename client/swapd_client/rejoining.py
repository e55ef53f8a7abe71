"""How a client whose models are attached joins the next daemon, in place of the one that is gone.

A call that finds it gone does so, once no lease of the client is in use: no thread computes on the
memory of the old daemon then. All that was registered is registered again, as it was, at its
addresses, or nothing is. That is done in a thread of its own, where no interrupt comes between its
steps; a call after an interrupt waits for it.
"""

import threading
import time
from typing import Protocol

from swapd_client.errors import NotRunning, OutOfMemory, SessionEnded, SwapdError
from swapd_client.leasing import Leasing
from swapd_client.memory.part import Part
from swapd_client.registration import end, register_again
from swapd_client.session.session import Session

#: A call waits so long for leases of other threads, which may wait for its own thread.
PATIENCE_S = 30.0
#: Seconds between two looks at them.
LOOK_S = 0.01


class _Client(Protocol):
    """What this needs of a `Client`."""

    leasing: Leasing
    joining: threading.Lock
    stays: bool

    def _leasing_of(self, session: Session) -> Leasing: ...

    def _move_to(self, leasing: Leasing) -> None: ...


def join_next(client: _Client, error: SessionEnded) -> None:
    """Implements `Client._join_next`."""
    lost = client.leasing
    if lost.session.forked:
        lost.session.life.leave_to_parent()
        lost.session.check()
    if lost.session.error is None and not lost.session.registry.deserted:
        return  # another call was first
    if not isinstance(lost.session.error, SessionEnded):
        raise error  # the daemon is only about to stop; or the client is closed
    _await_leases(lost, error)
    problems: list[BaseException] = []
    done = threading.Event()
    threading.Thread(
        target=_join_if_first, args=(client, lost, problems, done), name="swapd-joins", daemon=True
    ).start()
    done.wait()
    if problems:
        raise problems[0]


def stay(client: _Client) -> None:
    """Before closing: join no daemon from now on. Blocks while one is being joined."""
    if not client.leasing.session.forked:  # else another thread of the parent may hold the lock
        with client.joining:
            client.stays = True


def refuse_another_device(before: Session, now: Session) -> None:
    """Raise NotRunning unless the daemon of another session can have the tensors where they are."""
    if (before.welcome.uuid, before.welcome.device) != (now.welcome.uuid, now.welcome.device):
        raise NotRunning(
            f"swapd at {now.endpoint} serves {now.welcome.device}, but the weights are on "
            f"{before.welcome.device}: start one for that device"
        )


def _await_leases(lost: Leasing, error: SessionEnded) -> None:
    """Block until no lease is in use; raise `error` if one is this thread's, or stays."""
    until = time.monotonic() + PATIENCE_S
    while lost.in_use():
        if lost.cache.used(threading.get_ident()) or time.monotonic() > until:
            raise error
        time.sleep(LOOK_S)


def _join_if_first(
    client: _Client, lost: Leasing, problems: list[BaseException], done: threading.Event
) -> None:
    is_first = False
    try:
        with client.joining:
            if is_first := client.leasing is lost and not client.stays:
                _join(client, lost)
    except SwapdError as exc:
        problems.append(exc if lost.session.bare else _explained(exc))
    except BaseException as exc:  # noqa: BLE001 - the caller raises it
        problems.append(exc)
    finally:
        del client  # it may be collected, and closed, once its caller goes on
        done.set()
    if is_first and not problems:
        lost.close()  # may wait for an event loop that uses its channels


def _explained(error: SwapdError) -> SwapdError:
    explained = type(error)(
        f"{error}. No weights are lost, and the models stay attached: their next call tries again. "
        "client.close() makes them ordinary models"
    )
    explained.code, explained.__cause__ = error.code, error
    return explained


def _join(client: _Client, lost: Leasing) -> None:
    old = lost.session
    session = old.again()  # before anything changes: there may be no daemon
    session.again = old.again
    leasing = client._leasing_of(session)
    try:
        refuse_another_device(old, session)
        parts = _let_go(lost)
        families = {part.part_of for part in parts}
        kept = {name: size for name, size in old.registry.kept.items() if name in families}
        register_again(leasing, parts, kept)
    except BaseException:
        session.close()
        leasing.close()
        raise
    client._move_to(leasing)


def _let_go(lost: Leasing) -> list[Part]:
    """Close a lost session; return its components that have tensors, now private memory."""
    session = lost.session
    if not session.left:
        session.left = {part.name: part for part in session.registry.all()}
    end(lost, keep=True)
    if session.bare:
        raise OutOfMemory(
            f"the GPU has no room for private copies of "
            f"{', '.join(part.name for part in session.bare)}, so these are lost with the daemon: "
            "load the model again"
        )
    return [part for part in session.left.values() if not part.where.over]
