"""swapd's client: `connect`, `register`, `acquire`. Imports neither torch nor uvloop."""

from typing import TYPE_CHECKING, Any

from swapd import __version__
from swapd.shared.protocol import ForecastReply, StatusReply
from swapd_client.aio import AsyncClient, connect_async
from swapd_client.client import Client, connect
from swapd_client.errors import (
    AcquireTimeout,
    BadRequest,
    ClientClosed,
    ComponentGone,
    ComponentInUse,
    Conflict,
    DaemonGone,
    DaemonStopping,
    DeviceFailed,
    DeviceMemoryExhausted,
    DeviceUnavailable,
    DuplicateName,
    ForkedClient,
    HostMemoryExhausted,
    InternalError,
    InvalidSettings,
    InvalidSource,
    LimitReached,
    NotAnswering,
    NotOwner,
    NotRunning,
    NotWhileAttached,
    SessionEnded,
    SessionFenced,
    SessionForgotten,
    StartFailed,
    SwapdError,
    TooLarge,
    UnknownComponent,
    VersionMismatch,
    WouldDeadlock,
)
from swapd_client.faults import explain_faults
from swapd_client.lease import AsyncLease, Lease
from swapd_client.memory.component import Component

if TYPE_CHECKING:
    from swapd_client.offload.attachment import Attachment

__all__ = [
    "AcquireTimeout",
    "AsyncClient",
    "AsyncLease",
    "Attachment",
    "BadRequest",
    "Client",
    "ClientClosed",
    "Component",
    "ComponentGone",
    "ComponentInUse",
    "Conflict",
    "DaemonGone",
    "DaemonStopping",
    "DeviceFailed",
    "DeviceMemoryExhausted",
    "DeviceUnavailable",
    "DuplicateName",
    "ForecastReply",
    "ForkedClient",
    "HostMemoryExhausted",
    "InternalError",
    "InvalidSettings",
    "InvalidSource",
    "Lease",
    "LimitReached",
    "NotAnswering",
    "NotOwner",
    "NotRunning",
    "NotWhileAttached",
    "SessionEnded",
    "SessionFenced",
    "SessionForgotten",
    "StartFailed",
    "StatusReply",
    "SwapdError",
    "TooLarge",
    "UnknownComponent",
    "VersionMismatch",
    "WouldDeadlock",
    "__version__",
    "connect",
    "connect_async",
    "explain_faults",
]

if not TYPE_CHECKING:  # else mypy would accept every name

    def __getattr__(name: str) -> Any:
        """Import `Attachment` on first use, because it needs torch."""
        if name == "Attachment":
            from swapd_client.offload.attachment import Attachment

            return Attachment
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
