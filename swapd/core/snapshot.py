"""The status of each component and each session."""

from swapd.core.explain import holders
from swapd.core.fences import LIFELINE, REPLIES
from swapd.core.ledger import Ledger
from swapd.core.records import Component, State
from swapd.shared.protocol import ComponentStatus, SessionStatus


def component_status(ledger: Ledger, c: Component, now: float) -> ComponentStatus:
    return ComponentStatus(
        name=c.name,
        session=c.session,
        nbytes=c.nbytes,
        state=_state(ledger, c),
        policy=c.policy,
        group=c.group,
        mutable=c.mutable,
        leases=len(c.leases),
        holders=holders(ledger, c),
        idle_s=None if c.leases or c.last_used is None else now - c.last_used,
        loads=c.loads,
        evictions=c.evictions,
        hits=c.hits,
        swap_in_s=c.swap_in_s,
        copy_s=c.copy_s,
        part_of=c.part_of,
        kind="workspace" if c.workspace else "scratch" if c.scratch else "component",
        pinned=c.pinned,
    )


_OF_A_WORKSPACE = {State.ABSENT: "waiting", State.LOADING: "lending", State.RESIDENT: "lent"}


def _state(ledger: Ledger, c: Component) -> str:
    if c.workspace:
        return _OF_A_WORKSPACE.get(c.state, c.state.value)
    if c.state is State.RESIDENT and c.leases:
        return "leased"
    return "idle" if c.name in ledger.idle else c.state.value


def session_status(ledger: Ledger, session: int) -> SessionStatus:
    known = ledger.sessions[session]
    stays = sum(c.chunks for c in ledger.named(known.owns) if c.stays)
    turn = sum(c.chunks for c in ledger.named(known.turn) if not c.stays)
    return SessionStatus(
        session,
        known.label,
        len(known.leases),
        len(known.waiters),
        unread=any(ledger.debts.owes(session, what) for what in (LIFELINE, REPLIES)),
        stays_bytes=stays * ledger.chunk_bytes,
        turn_bytes=turn * ledger.chunk_bytes,
    )
