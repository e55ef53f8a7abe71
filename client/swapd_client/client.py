"""The synchronous client: what a stage calls."""

import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from swapd import protocol
from swapd.units import parse_size
from swapd_client.channel import Channel, ChannelFactory
from swapd_client.errors import ComponentInUse, DaemonGone, SessionFenced, SwapdError
from swapd_client.keeper import Keeper
from swapd_client.layout import Buffer, Segments
from swapd_client.session import Component, Session, default_label, resolve

if TYPE_CHECKING:
    import torch

#: What can be registered: a module's parameters, named tensors, or named buffers.
Source: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Mapping[str, Buffer]"


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
) -> "Client":
    """Connect to the daemon of a device.

    `endpoint` is its runtime folder; without it `$SWAPD_ENDPOINT`, else the default folder
    of `device` ("host" if not given). `label` names this process in the swap log.
    Blocks for one round trip. Raises: NotRunning, VersionMismatch, DaemonGone.
    """
    return Client(Session(resolve(endpoint, device), label or default_label()))


class Lease:
    """The right to use components; while it is held their bytes neither move nor change.

    Ends with `release` or with the `with` block, exceptions included. Released twice is
    released once. A lease belongs to the thread that took it: while that thread waits for
    another acquire, the daemon assumes that it releases nothing.
    """

    def __init__(self, client: "Client", granted: protocol.Granted, names: tuple[str, ...]) -> None:
        self.names = names
        #: Seconds from the request's arrival at the daemon to the grant.
        self.waited_s = granted.waited_s
        #: Whether a copy had to be made, or waited for.
        self.loaded = granted.loaded
        self._client = client
        self._granted = granted
        self._thread = threading.get_ident()
        self._held = True

    def __repr__(self) -> str:
        return f"<Lease {' + '.join(self.names)} {'held' if self._held else 'released'}>"

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with suppress(SessionFenced) if exc is not None else nullcontext():
            self.release()

    def __del__(self) -> None:
        if self._held and self._client.session.error is None:
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2)

    @property
    def wanted(self) -> bool:
        """Somebody waits for this memory, and its quantum is over: give way soon.

        Costs no message. A busy holder keeps its lease over many steps and looks here at
        the end of each.
        """
        wanted = self._client.session.wanted
        return bool(wanted) and not wanted.isdisjoint(self.names)

    def wait(self, segment: int | None = None, *, name: str | None = None) -> None:
        """Wait until a segment, and those before it, are on the device; None: all of them.

        Returns at once unless the lease was acquired `early`. `name` says of which component,
        if the lease has several. Raises: DeviceFailed if it will never come (release the lease,
        then acquire anew); DaemonGone and its kind if the session ended meanwhile.
        """
        self._client.session.wait(self._granted, name or self.names[0], segment)

    def release(self) -> None:
        """Give the components back. Does not block, from the thread that acquired.

        Does nothing if the daemon is gone. Raises: ForkedClient; SessionFenced if the daemon
        ended the session while this was held (see its log): then discard what was computed
        since, for others may have had the memory for a moment.
        """
        if self._held:
            self._held = False
            same = self._thread == threading.get_ident()
            self._client._release(self._granted, self.names, same=same)


class Client:
    """A session with one daemon. May be used from any thread; not across a fork.

    Made by `connect`. `close` it, or use it in a `with` block: its components then become
    ordinary private memory, with the weights in them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._factory = ChannelFactory(session)
        self._local = threading.local()
        self._keeper = Keeper(lambda: session.wanted, self._tell_released)
        session.when_wanted(self._keeper.hurry)

    def __repr__(self) -> str:
        return f"<Client session={self.session.welcome.session} at {self.session.endpoint}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def register(
        self,
        name: str,
        source: Source,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
    ) -> Component:
        """Move a component's weights into swapd, and leave the tensors where they are used.

        `source` is a module (its parameters; buffers stay private), or a dict of tensors or
        of buffers. Every byte is copied once, into the master; then each tensor's storage
        is the component's address range, for good, and the old memory is free. From here on
        the bytes may be touched under a lease only, and only read unless `mutable`.

        `policy`: "lru", "resident" (never evicted once in), "sequential" (dropped when
        released), or "alternating" with a `group` whose members exclude each other.

        `segments`: lists of names, or of what they are part of ("layers.0"), in the order in
        which they are needed: `lease.wait(i)` waits for the first i + 1. What no list names is
        in the first.

        Blocks for the copy. Raises: DuplicateName, TooLarge, HostMemoryExhausted,
        InvalidSource, DaemonGone; after any of them the source is as it was.
        """
        session = self.session
        part = session.prepare(name, source, mutable=mutable, segments=segments)
        registered = False
        try:
            self._call(session.register_request(part, policy, group))
            registered = True
            session.fill(part)
            self._call(protocol.Commit(session.next_id(), name))
        except BaseException:
            if registered and session.error is None:
                with suppress(SwapdError):  # what went wrong first is what to say
                    self._channel().call(protocol.Unregister(session.next_id(), name))
            session.discard(part)
            raise
        session.bind(part)
        return part

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        wait: bool = False,
        early: bool = False,
    ) -> Lease:
        """Wait until all of `names` are on the device, and hold them there.

        All or none. `timeout` in seconds; higher `priority` goes first; `wait` also waits
        for names that nobody has registered yet. With `early` it returns as soon as all copies
        are ordered: touch nothing of this process's components before `lease.wait(segment)`
        says that it is there. May be nested, and called from any thread.

        Raises: UnknownComponent, TooLarge, Conflict, WouldDeadlock, AcquireTimeout,
        ComponentGone, DeviceFailed, DaemonGone; then nothing is held.
        """
        session = self.session
        agent = threading.get_ident()
        if session.error is None and (kept := self._keeper.take((agent, names))):
            session.check()
            return Lease(self, kept, names)
        request = protocol.Acquire(session.next_id(), names, agent, timeout, priority, wait, early)
        granted = self._call(request, timeout)
        assert isinstance(granted, protocol.Granted)
        session.granted(granted)
        return Lease(self, granted, names)

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Lease:
        """Have `size` bytes ("6GiB") of device memory given to this process's own allocator.

        For loading a model, capturing graphs, a VAE decode. Idle components make room; on
        release the memory is swapd's again as soon as the driver has it back, so free it (and
        empty the allocator's cache) before. Rounded up to whole chunks.

        Blocks as `acquire`, and raises what it raises.
        """
        session = self.session
        nbytes = parse_size(size) if isinstance(size, str) else size
        request = protocol.AcquireWorkspace(
            session.next_id(), nbytes, threading.get_ident(), timeout, priority
        )
        granted = self._call(request, timeout)
        assert isinstance(granted, protocol.Granted)
        session.granted(granted)
        return Lease(self, granted, (f"workspace of {size}",))

    def prefetch(self, *names: str) -> None:
        """Ask for components to be brought in when there is room nobody waits for.

        Does not wait for the copy, takes no lease, promises nothing.
        """
        self._call(protocol.Prefetch(self.session.next_id(), names))

    def unregister(self, name: str) -> None:
        """Take a component back: its tensors become private memory, addresses and values kept.

        Raises: ComponentInUse if anybody leases it, UnknownComponent, DaemonGone.
        """
        part = self.session.own(name)
        self._keeper.flush_all()
        self._call(protocol.Unregister(self.session.next_id(), name))
        self.session.unbind(part)

    def status(self) -> protocol.StatusReply:
        """What is on the device, who holds it, and how much was moved."""
        reply = self._call(protocol.Status(self.session.next_id()))
        assert isinstance(reply, protocol.StatusReply)
        return reply

    def close(self) -> None:
        """End the session. Registered tensors become private memory; leases are over."""
        session = self.session
        with suppress(DaemonGone):  # then their last bytes are where they were
            self._keeper.close()
            self._take_back_mutable()
        session.close()
        self._factory.close()

    def _take_back_mutable(self) -> None:
        session = self.session
        mutable = [p for p in session.components.values() if p.mutable]
        if session.error is not None or not mutable:
            return
        for granted in list(session.leases.values()):
            self._tell_released(granted, self._keeper.again(granted))
        for part in mutable:
            with suppress(ComponentInUse):  # by another session: then copied from the device
                self.unregister(part.name)

    def _channel(self) -> Channel:
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = Channel(self._factory)
        return channel

    def _call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        self.session.check()
        self._keeper.flush(threading.get_ident())
        return self.session.unwrap(self._channel().call(request, timeout_s))

    def _release(self, granted: protocol.Granted, names: tuple[str, ...], *, same: bool) -> None:
        session = self.session
        key = (threading.get_ident(), names)
        if same and session.may_linger(granted) and self._keeper.keep(key, granted):
            return
        again = self._keeper.again(granted)
        if not same:
            self._tell_released(granted, again)  # another channel: wait, or it may come late
        elif session.give_back(granted):
            with suppress(DaemonGone):
                self._channel().send(protocol.Release(session.next_id(), granted.id, False, again))

    def _tell_released(self, granted: protocol.Granted, again: int) -> None:
        """End a lease from any thread; return when the daemon knows."""
        session = self.session
        if session.give_back(granted):
            with suppress(DaemonGone):
                self._channel().call(protocol.Release(session.next_id(), granted.id, True, again))
