"""Handles acquires, releases and prefetches."""

from swapd.core import explain, leases, verdict, workspaces
from swapd.core.admission import Admission
from swapd.core.handlers import starting
from swapd.core.ledger import Ledger
from swapd.core.records import Key, is_workspace, workspace_name
from swapd.shared.protocol import Acquire, AcquireWorkspace, Cancel, Code, Prefetch, Release


def on_acquire(ledger: Ledger, admission: Admission, session: int, asked: Acquire) -> None:
    key = (session, asked.id)
    if problem := _unheard(ledger, key):
        return ledger.refuse(key, *problem)
    _note_use(ledger, admission, session, asked)
    w = admission.waiter(session, asked)
    missing = [n for n in w.names if not ledger.may_be_acquired(n)]
    missing.sort(key=lambda n: not is_workspace(n))
    if missing and (not w.await_registration or is_workspace(missing[0])):
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, missing[0]))
    admission.ask(w, missing)


def on_acquire_workspace(
    ledger: Ledger, admission: Admission, session: int, asked: AcquireWorkspace
) -> None:
    key = (session, asked.id)
    if problem := _unheard(ledger, key):
        return ledger.refuse(key, *problem)
    if workspace_name(*key) in ledger.components:
        return ledger.refuse(key, "bad_request", explain.REPLAYED)  # its memory is on its way back
    name = workspaces.open_one(ledger, key, asked.nbytes, ledger.chunks_for(asked.nbytes))
    _note_use(ledger, admission, session, asked)
    by_name = Acquire(
        asked.id, (name,), asked.agent, asked.timeout_s, asked.priority, spare=asked.spare
    )
    admission.ask(admission.waiter(session, by_name), [])


def _note_use(
    ledger: Ledger, admission: Admission, session: int, asked: Acquire | AcquireWorkspace
) -> None:
    """Before any verdict on `asked`: which leases its agent holds is part of it."""
    if leases.note_use(ledger, (session, asked.agent), asked.holds):
        ledger.replan |= admission.somebody_waits


def _unheard(ledger: Ledger, key: Key) -> tuple[Code, str] | None:
    """Why an acquire with any names is refused, or None."""
    session = ledger.sessions.get(key[0])
    if session is None or key in ledger.starts:
        return "bad_request", explain.REPLAYED
    if key[1] in session.waiters or key[1] in session.leases:
        return "bad_request", explain.REPLAYED
    return ("stopping", explain.STOPPING) if ledger.stopping else None


def on_release(ledger: Ledger, admission: Admission, session: int, asked: Release) -> None:
    # The lease was released before, or its session is gone: no-op.
    if starting.end(ledger, (session, asked.lease)):
        return
    if leases.release(ledger, session, asked):
        ledger.replan |= admission.somebody_waits


def on_cancel(ledger: Ledger, admission: Admission, session: int, asked: Cancel) -> None:
    key = (session, asked.acquire)
    if w := admission.queue.get(key):
        admission.forget(w)
    elif not starting.end(ledger, key) and leases.take_back(ledger, key):
        ledger.replan |= admission.somebody_waits


def on_prefetch(ledger: Ledger, admission: Admission, session: int, asked: Prefetch) -> None:
    key = (session, asked.id)
    if ledger.stopping:
        return ledger.refuse(key, "stopping", explain.STOPPING)
    names = ledger.expand(asked.names)
    if asked.over is not None:
        names = tuple(name for name in names if ledger.may_be_acquired(name))
    for name in names:
        if not ledger.may_be_acquired(name):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
        if problem := verdict.cannot_come_in(ledger, [ledger.components[name]], None):
            return ledger.refuse(key, *explain.refused(ledger, problem))
    ledger.prefetches.update(dict.fromkeys(names, asked.over))
    for c in ledger.named(names):
        c.expected = not c.leases
    ledger.accept(key)
    ledger.replan = True
