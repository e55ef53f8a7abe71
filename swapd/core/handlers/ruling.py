"""Handles changes of the rules while decisions are made."""

import msgspec

from swapd.core import fences
from swapd.core.admission import Admission
from swapd.core.events import RulesChanged
from swapd.core.ledger import Ledger


def on_rules_changed(ledger: Ledger, admission: Admission, event: RulesChanged) -> None:
    """The next deadline may be past: that of requests or debts that are older than the new limits
    allow."""
    ledger.rules = msgspec.structs.replace(
        ledger.rules,
        ack_timeout_s=event.ack_timeout_s,
        residency_factor=event.residency_factor,
        residency_bound_s=event.residency_bound_s,
        patience_s=event.patience_s,
    )
    admission.queue.patience_s = event.patience_s
    timeout_s = event.ack_timeout_s
    ledger.debts.retime(timeout_s, fences.kept_what_is_lent(timeout_s))
    ledger.replan = True
