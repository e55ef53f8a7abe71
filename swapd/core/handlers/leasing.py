"""What acquires, releases and prefetches mean."""

from swapd.core import explain, leases, verdict, workspaces
from swapd.core.admission import Admission
from swapd.core.events import Acquire, AcquireWorkspace, Cancel, Prefetch, Release
from swapd.core.ledger import Ledger
from swapd.core.records import WORKSPACE, Key, workspace_name
from swapd.shared.protocol import Code


def on_acquire(ledger: Ledger, admission: Admission, event: Acquire) -> None:
    key = (event.session, event.request)
    if problem := _unheard(ledger, key):
        return ledger.refuse(key, *problem)
    w = admission.waiter(event)
    missing = [n for n in w.names if not ledger.may_be_acquired(n)]
    missing.sort(key=lambda n: not n.startswith(WORKSPACE))
    if missing and (not w.wait or missing[0].startswith(WORKSPACE)):
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, missing[0]))
    admission.ask(w, missing)


def on_acquire_workspace(ledger: Ledger, admission: Admission, event: AcquireWorkspace) -> None:
    key = (event.session, event.request)
    if problem := _unheard(ledger, key):
        return ledger.refuse(key, *problem)
    if workspace_name(*key) in ledger.components:
        return ledger.refuse(key, "bad_request", explain.REPLAYED)  # it is on its way back
    if event.nbytes <= 0:
        return ledger.refuse(key, "bad_request", explain.WORKSPACE_SIZE)
    name = workspaces.open_one(ledger, key, event.nbytes, ledger.chunks_for(event.nbytes))
    asked = Acquire(event.now, *key, event.agent, (name,), event.priority, event.deadline)
    admission.ask(admission.waiter(asked), [])


def _unheard(ledger: Ledger, key: Key) -> tuple[Code, str] | None:
    """Why an acquire is refused whatever it asks for, or None."""
    session = ledger.sessions.get(key[0])
    if session is None or key[1] in session.waiters or key[1] in session.leases:
        return "bad_request", explain.REPLAYED
    return ("stopping", explain.STOPPING) if ledger.stopping else None


def on_release(ledger: Ledger, admission: Admission, event: Release) -> None:
    # Released before, or its session is gone: nothing to do.
    if leases.take_back(ledger, (event.session, event.lease), again=event.again):
        ledger.replan |= admission.somebody_waits


def on_cancel(ledger: Ledger, admission: Admission, event: Cancel) -> None:
    if w := admission.queue.get((event.session, event.acquire)):
        admission.forget(w)
    else:
        on_release(ledger, admission, Release(event.now, event.session, event.acquire))


def on_prefetch(ledger: Ledger, admission: Admission, event: Prefetch) -> None:
    key = (event.session, event.request)
    if ledger.stopping:
        return ledger.refuse(key, "stopping", explain.STOPPING)
    names = ledger.expand(event.names)
    for name in names:
        if not ledger.may_be_acquired(name):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
        if problem := verdict.hopeless(ledger, None, [ledger.components[name]]):
            return ledger.refuse(key, *explain.refused(ledger, problem))
    ledger.prefetches.update(dict.fromkeys(names))
    ledger.accept(key)
    ledger.replan = True
