"""The states of a component, and every change from one to another.

A clean component whose worker need not acknowledge passes through REVOKING within one event.
"""

from enum import StrEnum


class State(StrEnum):
    FILLING = "filling"  # the worker fills the host copy; may not be acquired yet
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    REVOKING = "revoking"  # waits for the worker's acknowledgement
    WRITING_BACK = "writing back"
    RECLAIMING = "reclaiming"  # a workspace that no request needs any more


#: The causes of each change: events, and actions that the core orders then.
COMPONENT_CHANGES = {
    (State.FILLING, State.ABSENT): "`Commit`, `HostCopySealed`",
    (State.ABSENT, State.LOADING): "`CopyIn`",
    (State.LOADING, State.RESIDENT): "`CopiedIn`",
    (State.LOADING, State.REVOKING): "`CopyFailed`, and its worker has mapped the chunks: `Revoke`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.RESIDENT, State.REVOKING): "`Evict`, and if its worker has mapped it `Revoke`",
    (State.REVOKING, State.ABSENT): "`Revoked`, and there is nothing to save",
    (State.REVOKING, State.WRITING_BACK): "`Revoked`, `CopyOut`",
    (State.WRITING_BACK, State.ABSENT): "`CopiedOut`; for scratch also `CopyFailed`, `Lost`",
    (State.WRITING_BACK, State.RESIDENT): "`CopyFailed`: it stays, with its worker's writes",
}

#: A workspace has no host copy and no place in a worker, and is there for one lease.
WORKSPACE_CHANGES = {
    (State.ABSENT, State.LOADING): "`Lend`",
    (State.LOADING, State.RESIDENT): "`Lent`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.LOADING, State.RECLAIMING): "its request ended; `Reclaim` follows `Lent`",
    (State.RESIDENT, State.RECLAIMING): "its release, `Reclaim`",
    (State.RECLAIMING, State.ABSENT): "`Reclaimed` without `runs`: it is gone",
}


def table(changes: dict[tuple[State, State], str]) -> str:
    """The changes as a table in Markdown."""
    rows = [f"| {old} | {cause} | {new} |" for (old, new), cause in changes.items()]
    return "\n".join(["| from | when | to |", "| --- | --- | --- |", *rows])
