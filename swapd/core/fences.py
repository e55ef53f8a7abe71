"""The debts of sessions: their duties, the deadlines, and the message if one is fenced.

Pure. Acknowledgements of revocations are in the ledger (`acks`), with their components.
"""

from collections.abc import Iterator

from swapd.core.orders import Deadlines
from swapd.core.policy import Rules
from swapd.core.records import Component

#: Messages that a session must read: from its lifeline, or its replies. All other debts are to let
#: go of lent memory, named by the generation of the workspace.
LIFELINE, REPLIES = 0, -1

#: (session, debt)
Debt = tuple[int, int]


class Debts:
    """The debts of all sessions, with their deadlines. Noting one takes time logarithmic in their
    number.

    A session that is fenced or gone owes nothing.
    """

    def __init__(self) -> None:
        self._until: Deadlines[Debt] = Deadlines()
        #: When the debt began, and the message if it is late; by session and debt.
        self._why: dict[int, dict[int, tuple[float, str]]] = {}

    def __iter__(self) -> Iterator[Debt]:
        """All debts, in order of time."""
        return iter(self._until)

    def owes(self, session: int, what: int) -> bool:
        """Whether it owes this."""
        return what in self._why.get(session, {})

    def owe(self, session: int, what: int, since: float, timeout_s: float, why: str) -> None:
        """The session owes this from now on, or gets more time for it."""
        until = since + timeout_s
        self._until.set((session, what), until)
        self._why.setdefault(session, {})[what] = since, why

    def retime(self, timeout_s: float, why: str) -> None:
        """Sessions that must let go of lent memory get `timeout_s` for it, counted from when they
        were told."""
        for session, owed in self._why.items():
            for what, (since, _) in owed.items():
                if what not in (LIFELINE, REPLIES):
                    self.owe(session, what, since, timeout_s, why)

    def settle(self, session: int, what: int) -> None:
        """The session no longer owes this, if it did."""
        owed = self._why.get(session, {})
        if owed.pop(what, None) is not None:
            self._until.drop((session, what))
            if not owed:
                del self._why[session]

    def forget(self, session: int) -> None:
        for what in self._why.pop(session, ()):
            self._until.drop((session, what))

    def next_deadline(self) -> float | None:
        return self._until.next()

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """The sessions that took too long, each with the message; one entry for each late debt."""
        return [(session, self._why[session][what][1]) for session, what in self._until.over(now)]


def unacknowledged(c: Component, timeout_s: float) -> str:
    return (
        f"gave no acknowledgement within {timeout_s:g} s that {c.name!r} is unmapped; its session "
        f"is ended, connect again. {_more_time(timeout_s)}"
    )


def kept_what_is_lent(timeout_s: float) -> str:
    return (
        f"did not let go of memory lent to others within {timeout_s:g} s; its session is ended, "
        f"connect again. {_more_time(timeout_s)}"
    )


def _more_time(ack_timeout_s: float) -> str:
    """The setting that keeps a busy worker from being fenced."""
    longer = max(4 * ack_timeout_s, Rules().ack_timeout_s)
    return (
        "If its process was not stopped or stuck but busy (importing, compiling, collecting a "
        f"large heap: all that keeps the GIL), give it longer: swapd serve --ack-timeout {longer:g}"
    )


def unread(what: int, timeout_s: float) -> str:
    things = "messages" if what == LIFELINE else "replies"
    return (
        f"does not read: {things} are kept for it, and none taken in {timeout_s:g} s; its session "
        "is ended, connect again. Its process was stopped, or its threads cannot run"
    )


def unsent(error: str, timeout_s: float) -> str:
    return (
        f"cannot be sent its messages for {timeout_s:g} s: {error}; its session is ended, connect "
        "again. If descriptors are missing, raise the daemon's `ulimit -n` (LimitNOFILE in a unit)"
    )
