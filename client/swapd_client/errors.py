"""One exception for each reason to refuse a request, and for the loss of the daemon.

Every message tells the problem and the remedy. `SwapdError` catches them all.
"""

from swapd.shared.protocol import Code, Goodbye, Refused
from swapd.shared.text import plain


class SwapdError(Exception):
    """Base of all errors that swapd raises. Its text is one line, and safe to show.

    The text may contain names and reasons from other processes, or from files.
    """

    def __str__(self) -> str:
        return plain(super().__str__())


class NotRunning(SwapdError):
    """No daemon serves the endpoint."""


class StartFailed(NotRunning):
    """The daemon that `connect(start=True)` started does not serve; the message is its own."""


class SessionEnded(SwapdError):
    """The session is over and takes no requests. `DaemonGone` and `SessionFenced` tell why.

    Call `Client.close`, then connect again.
    """


class DaemonGone(SessionEnded):
    """The daemon ended. Mapped memory stays mapped, so holders of leases can go on.

    `Client.close` then turns the registered tensors into private memory, weights intact.
    """


class NotAnswering(DaemonGone, TimeoutError):
    """The daemon exists, but does not answer in time: it is stopped, or busy."""


class ClientClosed(SwapdError):
    """The client was closed, here or by another thread."""


class ForkedClient(SwapdError):
    """The process forked after connecting; sessions and weights stay with the parent."""


class InvalidSource(SwapdError, ValueError):
    """These tensors cannot be registered; the message names the first that cannot."""


class InvalidSettings(SwapdError, ValueError):
    """A setting is unknown or invalid; the message names it, and where it was set."""


class NotWhileAttached(SwapdError, RuntimeError):
    """This use of a module with weights in swapd is impossible; the message names the remedy."""


class BadRequest(SwapdError):
    """The daemon does not understand the request, or the request contradicts itself or is too
    large.
    """


class VersionMismatch(SwapdError):
    """Client and daemon speak different protocol versions."""


class UnknownComponent(SwapdError):
    """No component of this name is registered."""


class DuplicateName(SwapdError):
    """A component of this name is registered already."""


class NotOwner(SwapdError):
    """The component belongs to another session."""


class ComponentInUse(SwapdError):
    """The component is leased, so swapd cannot unregister, evict or pin it now."""


class TooLarge(SwapdError):
    """The component can never fit into the budget."""


class Conflict(SwapdError):
    """These components exclude each other, so they are never resident together."""


class HostMemoryExhausted(SwapdError):
    """The host has no room for another host copy."""


class DeviceUnavailable(SwapdError):
    """This process cannot use the daemon's GPU; the message says what is missing."""


class DeviceMemoryExhausted(SwapdError):
    """The GPU has no room for a private copy; the component stays registered and intact."""


class WouldDeadlock(SwapdError):
    """This wait would close a cycle of waiting sessions, which could never go on."""


class AcquireTimeout(SwapdError, TimeoutError):
    """The timeout passed before the components could be granted."""


class ComponentGone(SwapdError):
    """The session that registered the component ended, or unregistered it."""


class DeviceFailed(SwapdError):
    """A copy failed, or a call of this process's GPU. The host copy is intact."""


class DaemonStopping(DaemonGone):
    """The daemon was told to stop."""


class SessionFenced(SessionEnded):
    """The daemon ended this session alone, because the process did not answer in time.

    The daemon goes on, and other processes may have used the memory for a moment. Discard the
    results computed under a lease since.
    """


class SessionForgotten(SessionFenced):
    """The daemon has already ended the session; a request found that out first."""


class LimitReached(SwapdError):
    """A limit is reached: of open files, sessions or connections, here or in the daemon.

    The message names the limit and the setting for it.
    """


class InternalError(SwapdError):
    """The daemon failed internally while it answered; it serves on, and its log has details."""


BY_CODE: dict[Code, type[SwapdError]] = {
    "bad_request": BadRequest,
    "version": VersionMismatch,
    "no_session": SessionForgotten,
    "unknown_component": UnknownComponent,
    "duplicate_name": DuplicateName,
    "not_owner": NotOwner,
    "in_use": ComponentInUse,
    "too_large": TooLarge,
    "conflict": Conflict,
    "host_memory": HostMemoryExhausted,
    "deadlock": WouldDeadlock,
    "timeout": AcquireTimeout,
    "component_gone": ComponentGone,
    "device_failed": DeviceFailed,
    "stopping": DaemonStopping,
    "fenced": SessionFenced,
    "limit": LimitReached,
    "internal": InternalError,
}


def from_refusal(refusal: Refused | Goodbye) -> SwapdError:
    """The exception for a refusal."""
    return BY_CODE[refusal.code](refusal.message)
