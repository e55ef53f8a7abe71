"""One exception for each way a request can be refused, and for losing the daemon.

Every message says what is wrong and what to do. `SwapdError` catches them all.
"""

from swapd.shared.protocol import Code, Goodbye, Refused
from swapd.shared.text import plain


class SwapdError(Exception):
    """Base of everything swapd raises. Its text is one line, and safe to show.

    Names and reasons in it may be those of other processes, or of files.
    """

    def __str__(self) -> str:
        return plain(super().__str__())


class NotRunning(SwapdError):
    """No daemon serves the endpoint."""


class StartFailed(NotRunning):
    """The daemon that `connect(start=True)` started does not serve; the message is its own."""


class SessionEnded(SwapdError):
    """The session is over, and nothing can be asked under it any more: `DaemonGone` and
    `SessionFenced` say why. `Client.close`, then connect again.
    """


class DaemonGone(SessionEnded):
    """The daemon ended. What is mapped stays mapped, so whoever holds a lease can go on.

    `Client.close` then turns the registered tensors into private memory, weights intact.
    """


class NotAnswering(DaemonGone, TimeoutError):
    """The daemon is there, and does not answer in time: it is stopped, or busy."""


class ClientClosed(SwapdError):
    """The client was closed, here or by another thread."""


class ForkedClient(SwapdError):
    """The process forked after connecting; sessions and weights stay with the parent."""


class InvalidSource(SwapdError, ValueError):
    """These tensors cannot be registered; the message names the first that cannot."""


class InvalidSettings(SwapdError, ValueError):
    """A setting is unknown or makes no sense; the message names it, and where it stands."""


class NotWhileAttached(SwapdError, RuntimeError):
    """A module whose weights are in swapd cannot be used so; the message says what to do first."""


class BadRequest(SwapdError):
    """The daemon does not understand this request, it contradicts itself, or it is too much."""


class VersionMismatch(SwapdError):
    """Client and daemon speak different protocol versions."""


class UnknownComponent(SwapdError):
    """Nobody has registered a component of this name."""


class DuplicateName(SwapdError):
    """A component of this name is registered already."""


class NotOwner(SwapdError):
    """The component belongs to another session."""


class ComponentInUse(SwapdError):
    """The component is leased, so it cannot be unregistered."""


class TooLarge(SwapdError):
    """It can never fit into the budget."""


class Conflict(SwapdError):
    """These components exclude each other, so they are never resident together."""


class HostMemoryExhausted(SwapdError):
    """The host has no room for another host copy."""


class DeviceUnavailable(SwapdError):
    """This process cannot use the daemon's GPU; the message says what is missing."""


class DeviceMemoryExhausted(SwapdError):
    """The GPU has no room for a private copy; the component is still registered, and well."""


class WouldDeadlock(SwapdError):
    """Who waits holds what the others wait for: nobody could ever go on."""


class AcquireTimeout(SwapdError, TimeoutError):
    """The timeout passed before the components could be granted."""


class ComponentGone(SwapdError):
    """The session that registered the component ended, or unregistered it."""


class DeviceFailed(SwapdError):
    """A copy failed, or a call of this process's GPU. The bytes are safe where they were."""


class DaemonStopping(DaemonGone):
    """The daemon was told to stop."""


class SessionFenced(SessionEnded):
    """The daemon ended this session alone, as the process did not answer in time. It goes on, and
    others may have had the memory for a moment: discard what was computed under a lease since.
    """


class SessionForgotten(SessionFenced):
    """The daemon knows the session no longer: it ended it, and a request found that out first."""


class LimitReached(SwapdError):
    """This process, or the daemon, may have no more of something: open files, sessions,
    connections. The message says of what, and what to set."""


class InternalError(SwapdError):
    """The daemon made a mistake of its own in answering; it serves on, and its log says more."""


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
