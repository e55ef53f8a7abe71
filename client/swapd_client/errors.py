"""One exception for each remedy. Every message tells the problem and the remedy.

`SwapdError` catches them all.
"""

from swapd.shared.errors import UserError
from swapd.shared.protocol import Code, Goodbye, Refused
from swapd.shared.text import plain


class SwapdError(UserError):
    """Base of all errors that swapd raises. Its text is one line, and safe to show.

    The text may contain names and reasons from other processes, or from files. Raised itself if the
    daemon failed internally while it answered: the daemon goes on, and its log has details.
    """

    #: The daemon's code, which is finer than the class; None if this process found the reason.
    code: Code | None = None

    def __str__(self) -> str:
        return plain(super().__str__())


class NotRunning(SwapdError):
    """No daemon serves the endpoint, and `connect(start=True)` could not start one."""


class VersionMismatch(SwapdError):
    """Client and daemon speak different protocol versions."""


class SessionEnded(SwapdError):
    """The session is over and takes no requests. `DaemonGone` and `SessionFenced` tell why.

    The next call of an attached model joins the next daemon; so does that of the client, if the
    last one is gone: see `connect(reconnect=)`.
    """


class DaemonGone(SessionEnded):
    """The daemon ended, or was told to stop. Mapped memory stays mapped, so holders can go on.

    `Client.close` then turns the registered tensors into private memory, weights intact.
    """


class SessionFenced(SessionEnded):
    """The daemon ended this session alone, because the process did not answer in time.

    The daemon goes on, and other processes may have used the memory for a moment. Discard the
    results computed under a lease since.
    """


class ClientClosed(SwapdError):
    """This process cannot use the client: it was closed, or stays with the parent after a fork."""


class Timeout(SwapdError, TimeoutError):
    """The timeout passed before the components were granted, or the daemon answered."""


class Deadlock(SwapdError):
    """This wait would close a cycle of waiting sessions, which could never go on."""


class UnknownComponent(SwapdError):
    """No component of this name is registered, or its session ended or unregistered it."""


class DuplicateName(SwapdError):
    """A component of this name is registered already."""


class InUse(SwapdError):
    """Others have the component: a lease, or the session that registered it."""


class TooLarge(SwapdError):
    """The component can never fit into the budget."""


class Conflict(SwapdError):
    """These components, or these calls, exclude each other."""


class OutOfMemory(SwapdError):
    """The host has no room for another host copy, or the GPU has none for a private copy."""


class DeviceFailed(SwapdError):
    """A copy or a call of the GPU failed, or this process cannot use the GPU.

    The host copy is intact.
    """


class LimitReached(SwapdError):
    """A limit is reached: of open files, sessions or connections, here or in the daemon.

    The message names the limit and the setting for it.
    """


class InvalidArgument(SwapdError, ValueError):
    """An argument or a setting is unknown, or contradicts another; the message names it."""


class InvalidSource(SwapdError, ValueError):
    """These tensors cannot be registered; the message names the first that cannot."""


class NotWhileAttached(SwapdError, RuntimeError):
    """This use of a module with weights in swapd is impossible; the message names the remedy."""


BY_CODE: dict[Code, type[SwapdError]] = {
    "bad_request": InvalidArgument,
    "version": VersionMismatch,
    "no_session": SessionFenced,
    "unknown_component": UnknownComponent,
    "duplicate_name": DuplicateName,
    "not_owner": InUse,
    "in_use": InUse,
    "too_large": TooLarge,
    "conflict": Conflict,
    "host_memory": OutOfMemory,
    "deadlock": Deadlock,
    "timeout": Timeout,
    "component_gone": UnknownComponent,
    "device_failed": DeviceFailed,
    "stopping": DaemonGone,
    "fenced": SessionFenced,
    "limit": LimitReached,
    "internal": SwapdError,
}

#: Former names, and the present ones.
RENAMED = {
    "AcquireTimeout": "Timeout",
    "BadRequest": "InvalidArgument",
    "ComponentGone": "UnknownComponent",
    "ComponentInUse": "InUse",
    "DaemonStopping": "DaemonGone",
    "DeviceMemoryExhausted": "OutOfMemory",
    "DeviceUnavailable": "DeviceFailed",
    "ForecastReply": "Forecast",
    "ForkedClient": "ClientClosed",
    "HostMemoryExhausted": "OutOfMemory",
    "InternalError": "SwapdError",
    "InvalidSettings": "InvalidArgument",
    "NotAnswering": "Timeout",
    "NotOwner": "InUse",
    "SessionForgotten": "SessionFenced",
    "StartFailed": "NotRunning",
    "StatusReply": "Status",
    "WouldDeadlock": "Deadlock",
}


def from_refusal(refusal: Refused | Goodbye) -> SwapdError:
    error = BY_CODE[refusal.code](refusal.message)
    error.code = refusal.code
    return error
