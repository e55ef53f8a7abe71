"""swapd's client: `connect`, `register`, `acquire`. Imports neither torch nor uvloop."""

from typing import TYPE_CHECKING, Any

from swapd import __version__
from swapd.shared.protocol import Forecast, Status
from swapd_client.aio import AsyncClient, connect_async
from swapd_client.async_lease import AsyncLease
from swapd_client.client import Client, connect
from swapd_client.errors import (
    RENAMED,
    ClientClosed,
    Conflict,
    DaemonGone,
    Deadlock,
    DeviceFailed,
    DuplicateName,
    InUse,
    InvalidArgument,
    InvalidSource,
    LimitReached,
    NotRunning,
    NotWhileAttached,
    OutOfMemory,
    SessionEnded,
    SessionFenced,
    SwapdError,
    Timeout,
    TooLarge,
    UnknownComponent,
    VersionMismatch,
)
from swapd_client.faults import explain_faults
from swapd_client.lease import Lease
from swapd_client.memory.component import Component

if TYPE_CHECKING:
    from swapd_client.offload.attachment import Attachment

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "Attachment",
    "Client",
    "ClientClosed",
    "Component",
    "Conflict",
    "DaemonGone",
    "Deadlock",
    "DeviceFailed",
    "DuplicateName",
    "Forecast",
    "InUse",
    "InvalidArgument",
    "InvalidSource",
    "Lease",
    "LimitReached",
    "NotRunning",
    "NotWhileAttached",
    "OutOfMemory",
    "SessionEnded",
    "SessionFenced",
    "Status",
    "SwapdError",
    "Timeout",
    "TooLarge",
    "UnknownComponent",
    "VersionMismatch",
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
        if name in RENAMED:  # another error would lose its message in `from swapd_client import`
            raise ImportError(f"swapd_client.{name} is swapd_client.{RENAMED[name]} now")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
