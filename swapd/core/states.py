"""The states of a component and of a workspace, and the changes between them."""

from enum import StrEnum


class State(StrEnum):
    FILLING = "filling"  # the worker fills the host copy; may not be acquired yet
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    STOPPING = "stopping"  # its load is ended early
    REVOKING = "revoking"  # waits for the worker's acknowledgement
    WRITING_BACK = "writing back"
    RECLAIMING = "reclaiming"  # a workspace whose memory is on its way back


LEAVING = (State.STOPPING, State.REVOKING, State.WRITING_BACK, State.RECLAIMING)

#: Allowed state changes, with the events and actions that cause them.
COMPONENT_CHANGES = {
    (State.FILLING, State.ABSENT): "`Commit`, `HostCopySealed`",
    (State.ABSENT, State.LOADING): "`CopyIn`",
    (State.LOADING, State.RESIDENT): "`CopiedIn`",
    (State.LOADING, State.REVOKING): "`CopyFailed`, and its worker has mapped it: `SendRevoke`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.LOADING, State.STOPPING): "`Evict`, `StopCopy`",
    (State.STOPPING, State.ABSENT): "`CopyStopped`, or `CopiedIn`, `CopyFailed`",
    (State.RESIDENT, State.REVOKING): "`Evict`, and if its worker has mapped it `SendRevoke`",
    (State.REVOKING, State.ABSENT): "`RevokeAck`, and there is nothing to save",
    (State.REVOKING, State.WRITING_BACK): "`RevokeAck`, `CopyOut`",
    (State.WRITING_BACK, State.ABSENT): "`CopiedOut`; for scratch also `CopyFailed`, `Lost`",
    (State.WRITING_BACK, State.RESIDENT): "`CopyFailed`: it stays, with its worker's writes",
}

#: A workspace has no host copy, and exists for one lease.
WORKSPACE_CHANGES = {
    (State.ABSENT, State.LOADING): "`Lend`",
    (State.LOADING, State.RESIDENT): "`Lent`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.LOADING, State.RECLAIMING): "its request ended; `Reclaim` follows `Lent`",
    (State.RESIDENT, State.RECLAIMING): "its release, `Reclaim`",
    (State.RECLAIMING, State.ABSENT): "`Reclaimed` without `runs`: it is gone",
}
