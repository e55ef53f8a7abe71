"""One session with the daemon: the lifeline, its thread, and what is mapped where.

Both clients, sync and async, are a way of carrying requests; everything they have in
common is here. One background thread per session reads the lifeline: revocations,
`wanted`, the descriptors of masters, and EOF, which ends every wait.
"""

import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from swapd import config, protocol, runtime_dir
from swapd.board import ArrivalFailed, Board, word
from swapd.device import vm
from swapd.fds import OwnedFd, recv_packet, send_packet
from swapd.system import open_pidfd
from swapd_client.errors import (
    BadRequest,
    ClientClosed,
    DaemonGone,
    DeviceFailed,
    DuplicateName,
    ForkedClient,
    InvalidSource,
    NotRunning,
    SessionFenced,
    SwapdError,
    UnknownComponent,
    VersionMismatch,
    from_refusal,
)
from swapd_client.files import Files
from swapd_client.layout import BufferLayout, Layout, Segments
from swapd_client.mapping import Range

#: How long a daemon may take to answer the hello, or to send a master it has promised.
ANSWER_S = 30.0


class Component:
    """A registered component: where it is, and how much it is.

    `address` never changes. The bytes may be touched under a lease only.
    """

    def __init__(self, name: str, layout: Layout, where: Range, *, mutable: bool) -> None:
        self.name = name
        self.nbytes = layout.nbytes
        self.address = where.address
        self.mutable = mutable
        self._layout = layout
        self._range = where
        #: How many segments it arrives in.
        self.segments = len(layout.segments)
        self._master: OwnedFd | None = None
        self._slot = 0
        self._holders = 0

    def __repr__(self) -> str:
        return f"<Component {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    def view(self, key: str) -> memoryview:
        """One of the buffers it was registered from, at its stable address."""
        if not isinstance(self._layout, BufferLayout):
            raise InvalidSource("this component was made from tensors; use those")
        view = self._layout.view(key, self.address)
        return view if self.mutable else view.toreadonly()

    def _close(self) -> None:
        if self._master is not None:
            self._master.close()


class Session:
    """What a process has with one daemon. Thread-safe, except that `close` comes last."""

    def __init__(self, endpoint: Path, label: str) -> None:
        """Connect and shake hands. Raises: NotRunning, VersionMismatch, DaemonGone."""
        self.endpoint = endpoint
        self.components: dict[str, Component] = {}
        #: Names whose memory somebody waits for; read by `lease.wanted`.
        self.wanted: set[str] = set()
        #: What the daemon granted and nobody released, by the request's id.
        self.leases: dict[int, protocol.Granted] = {}
        self._lock = threading.Lock()
        self._ids = 0
        self._masters: dict[str, tuple[OwnedFd, int]] = {}
        #: Why a residency that was granted early will never be complete.
        self._broken: dict[tuple[str, int], str] = {}
        self._master_came = threading.Condition(self._lock)
        self._error: SwapdError | None = None
        self._listeners: list[Callable[[SwapdError], None]] = []
        self._wanted_listeners: list[Callable[[], None]] = []
        self._forked = False
        self._closed = False
        self._sock, self._daemon_pid = _connect(endpoint / runtime_dir.LIFELINE)
        #: Becomes readable, for good, when the session ends.
        self.ended = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        try:
            self.welcome, self._board = self._handshake(label)
        except BaseException:
            self._sock.close()
            self.ended.close()
            raise
        self._files = Files(self.welcome.chunks_per_file)
        self._thread = threading.Thread(target=self._listen, name="swapd-lifeline", daemon=True)
        self._thread.start()
        _alive.add(self)

    def __repr__(self) -> str:
        return f"<Session {self.welcome.session} at {self.endpoint}>"

    # --- for the two clients -------------------------------------------------------------

    def next_id(self) -> int:
        with self._lock:
            self._ids += 1
            return self._ids

    def check(self) -> None:
        """Raise if requests make no sense any more, saying why."""
        if self._forked:
            raise ForkedClient(
                "this process was forked from one that uses swapd: sessions and weights stay "
                "with the parent. Connect in the child, or start it with spawn"
            )
        if self._error is not None:
            raise self._error

    @property
    def error(self) -> SwapdError | None:
        """Why the session ended, or None."""
        return self._error

    def when_ended(self, listener: Callable[[SwapdError], None]) -> None:
        """Call `listener` with why, in the lifeline's thread, when the session ends."""
        self._listeners.append(listener)

    def when_wanted(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the lifeline's thread when `wanted` grows. It must not block."""
        self._wanted_listeners.append(listener)

    def may_linger(self, granted: protocol.Granted) -> bool:
        """Whether a lease may stay held for a moment after its release, unseen by the daemon.

        Not under strict isolation, where nothing may be touched from its release on; and not
        while something it was granted early still comes in.
        """
        if self._error is not None or self.welcome.strict:
            return False
        self.check()
        with suppress(ArrivalFailed):
            return all(self._has_arrived(place) for place in granted.placements)
        return False

    def _has_arrived(self, place: protocol.Placement) -> bool:
        part = self.components[place.name]
        return self._board.has(part._slot, word(place.generation, part.segments))

    def unwrap(self, reply: protocol.AnyReply) -> protocol.AnyReply:
        """Return a reply that is not a refusal; raise the one that is."""
        if isinstance(reply, protocol.Refused):
            raise from_refusal(reply)
        return reply

    def prepare(
        self, name: str, source: object, *, mutable: bool, segments: Segments = ()
    ) -> Component:
        """Reserve a range for `source`. Nothing is copied or rebound yet."""
        self.check()
        with self._lock:
            if name in self.components:
                raise DuplicateName(f"{name!r} is registered by this process; unregister it first")
        layout = _layout(source, segments)
        where = Range(layout.nbytes, self.welcome.chunk_bytes, self._files, writable=mutable)
        return Component(name, layout, where, mutable=mutable)

    def register_request(
        self, part: Component, policy: protocol.Policy, group: str | None
    ) -> protocol.Register:
        return protocol.Register(
            self.next_id(),
            part.name,
            part.nbytes,
            part._layout.digest(),
            policy,
            group,
            part.mutable,
            part._layout.segments if part.segments > 1 else (),
        )

    def fill(self, part: Component) -> None:
        """Copy the source into the master the daemon has sent. Blocks for the copy."""
        part._master, part._slot = self._take_master(part.name)
        if part.nbytes:
            span = vm.round_up(part.nbytes)
            target = vm.map_shared(part._master.fileno(), 0, span, writable=True)
            try:
                part._layout.fill(target)
            finally:
                vm.free(target, span)
        with self._lock:  # before the commit: another thread may be granted it right after
            self.components[part.name] = part

    def bind(self, part: Component) -> None:
        """The daemon has accepted the master: the source now lives at the range."""
        part._layout.bind(part.address)

    def discard(self, part: Component) -> None:
        """Registering failed: leave nothing of it. The source was not touched."""
        with self._lock:
            if self.components.get(part.name) is part:
                del self.components[part.name]
        part._range.discard()
        part._close()

    def own(self, name: str) -> Component:
        with self._lock:
            part = self.components.get(name)
        if part is None:
            raise UnknownComponent(f"{name!r} is not registered by this process")
        return part

    def unbind(self, part: Component, *, keep_shown: bool = False) -> None:
        """Make a component's tensors ordinary private memory, values and addresses kept."""
        assert part._master is not None
        part._range.make_private(part._master, keep_shown=keep_shown)
        part._close()
        with self._lock:
            self.components.pop(part.name, None)
            self.wanted.discard(part.name)

    def granted(self, granted: protocol.Granted) -> None:
        """Put the chunks of what was granted behind its ranges."""
        self.leases[granted.id] = granted
        for place in granted.placements:
            part = self.components[place.name]
            with self._lock:
                part._holders += 1
            part._range.show(place.generation, place.runs)

    def wait(self, granted: protocol.Granted, name: str, segment: int | None) -> None:
        """Block until a segment of a granted component, or all of it, is on the device.

        Raises: DeviceFailed if it never will be; what ended the session.
        """
        for place in granted.placements:
            if place.name == name:
                part = self.components[name]
                arrived = part.segments if segment is None else segment + 1
                self._wait(part, place.generation, arrived)
                return
        # whatever is not this session's was complete when it was granted

    def _wait(self, part: Component, generation: int, arrived: int) -> None:
        try:
            self._board.wait(part._slot, word(generation, arrived))
        except ArrivalFailed:
            if self._error is not None:
                raise self._error from None
            why = self._broken.get((part.name, generation), "this lease is over")
            raise DeviceFailed(f"{part.name!r} did not come in: {why}") from None

    def give_back(self, granted: protocol.Granted) -> bool:
        """A lease ends here; whether the daemon is still there to be told.

        Raises: SessionFenced if it ended before, because the daemon had ended the session:
        for a moment others may have had the memory. ForkedClient.
        """
        if isinstance(self._error, SessionFenced):
            raise self._error
        if self._error is not None:
            return False
        self.check()
        self._released(granted)
        return True

    def _released(self, granted: protocol.Granted) -> None:
        """Under strict isolation, what nobody in this process holds may not be touched."""
        self.leases.pop(granted.id, None)
        for place in granted.placements:
            part = self.components.get(place.name)
            if part is None:
                continue
            with self._lock:
                part._holders -= 1
                hide = self.welcome.strict and not part._holders and self._error is None
                if hide:
                    part._range.hide(place.generation)

    def close(self) -> None:
        """End the session: every component becomes private memory, with its weights.

        Closed twice is closed once.
        """
        with self._lock:
            if self._forked or self._closed:
                return
            self._closed = True
        self._end(ClientClosed("this client is closed; connect again"))
        self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for part in list(self.components.values()):
            self.unbind(part, keep_shown=part.mutable)
        for master, _ in self._masters.values():
            master.close()
        self._sock.close()
        self._files.close()
        self.ended.close()
        _alive.discard(self)

    # --- the lifeline --------------------------------------------------------------------

    def _handshake(self, label: str) -> tuple[protocol.Welcome, Board]:
        self._sock.settimeout(ANSWER_S)
        with suppress(OSError):  # refused already: what it said comes next
            send_packet(self._sock, protocol.encode(protocol.Hello(protocol.VERSION, label)))
        try:
            data, fds = self._recv()
        except OSError as exc:
            raise DaemonGone(f"{self.endpoint}: the daemon did not answer ({exc})") from exc
        if not data:
            raise DaemonGone(f"{self.endpoint}: the daemon closed the connection")
        try:
            message = protocol.decode_from_daemon(data)
        except msgspec.MsgspecError as exc:
            raise VersionMismatch(f"{self.endpoint}: not understood: {exc}") from exc
        if isinstance(message, protocol.Goodbye):
            raise from_refusal(message)
        if not isinstance(message, protocol.Welcome) or len(fds) != 1:
            raise VersionMismatch(f"{self.endpoint}: expected a welcome, got {message!r}")
        self._sock.settimeout(None)
        with fds[0] as board:
            return message, Board(board)

    def _listen(self) -> None:
        try:
            while self._receive():
                pass
        except (OSError, ValueError, msgspec.MsgspecError) as exc:
            self._end(DaemonGone(f"{self.endpoint}: lost the daemon: {exc}"))

    def _recv(self) -> tuple[bytes, list[OwnedFd]]:
        try:
            return recv_packet(self._sock, protocol.LIFELINE_MAX_BYTES)
        except ConnectionResetError:
            # It closed before it read all of ours: said once, then its last words come.
            return recv_packet(self._sock, protocol.LIFELINE_MAX_BYTES)

    def _receive(self) -> bool:
        data, fds = self._recv()
        if not data:
            self._end(self._lost())
            return False
        match protocol.decode_from_daemon(data):
            case protocol.Revoke() as revoke:
                self._revoke(revoke)
            case protocol.Saved() as saved:
                if part := self.components.get(saved.name):
                    part._range.saved(saved.generation)
            case protocol.Wanted() as wanted:
                self._set_wanted(wanted)
            case protocol.Master() as master:
                (fd,) = fds
                with self._master_came:
                    self._masters[master.name] = fd, master.slot
                    self._master_came.notify_all()
            case protocol.Files() as files:
                self._files.add(files, fds)
            case protocol.Drop() as drop:
                self._send(protocol.Dropped(drop.ticket))
            case protocol.Broken() as broken:
                self._on_broken(broken)
            case protocol.Goodbye() as goodbye:
                if goodbye.code != "stopping":
                    self._let_go()
                self._end(from_refusal(goodbye))
            case protocol.Welcome():
                raise ValueError("a second welcome")
        return True

    def _revoke(self, revoke: protocol.Revoke) -> None:
        part = self.components.get(revoke.name)
        if part is not None:
            part._range.hide(revoke.generation)
        if revoke.ack:
            self._send(protocol.Revoked(revoke.name, revoke.generation))

    def _send(self, message: protocol.FromClient) -> None:
        with suppress(OSError):  # too late: what ended the session comes next
            send_packet(self._sock, protocol.encode(message))

    def _on_broken(self, broken: protocol.Broken) -> None:
        """Say why before the word on the board ends the waits."""
        self._broken[broken.name, broken.generation] = broken.why
        if part := self.components.get(broken.name):
            self._board.fail(part._slot, broken.generation)

    def _lost(self) -> SwapdError:
        """The lifeline ended without a word: the daemon died, or goes on without us."""
        watch = open_pidfd(self._daemon_pid)
        if watch is None:
            return DaemonGone(
                f"{self.endpoint}: the daemon is gone. What you hold stays mapped; close() "
                "makes all tensors private memory. Start swapd again, then reconnect"
            )
        os.close(watch)
        self._let_go()
        return SessionFenced(
            f"{self.endpoint}: the daemon has ended this session, and its log says why. What you "
            "hold is private memory now; close() makes all tensors that. Then connect again"
        )

    def _let_go(self) -> None:
        """The daemon goes on without this session: others will use the chunks it holds.

        Whoever computes on a clean component finds the same bytes there, in the master. The
        chunks of a mutable one are kept for this process by the daemon.
        """
        for part in list(self.components.values()):
            if not part.mutable and part._range.shown:
                assert part._master is not None
                part._range.make_private(part._master, keep_shown=False)

    def _set_wanted(self, wanted: protocol.Wanted) -> None:
        if wanted.wanted:
            self.wanted.add(wanted.name)
            for listener in self._wanted_listeners:
                listener()
        else:
            self.wanted.discard(wanted.name)

    def _take_master(self, name: str) -> tuple[OwnedFd, int]:
        """The master's descriptor, from now on the caller's, and the component's slot."""
        with self._master_came:
            self._master_came.wait_for(
                lambda: name in self._masters or self._error is not None, ANSWER_S
            )
            self.check()
            if name not in self._masters:
                raise DaemonGone(f"{self.endpoint}: the daemon sent no master for {name!r}")
            return self._masters.pop(name)

    def _end(self, error: SwapdError) -> None:
        """Remember why, once, and wake every wait."""
        with self._master_came:
            if self._error is not None:
                return
            self._error = error
            self._master_came.notify_all()
        self._files.end()
        self._board.fail_all([part._slot for part in list(self.components.values())])
        os.eventfd_write(self.ended.fileno(), 1)
        for listener in self._listeners:
            listener(error)

    def _after_fork(self) -> None:
        """In the child: let go of the lifeline, or the parent's death would go unseen."""
        self._forked = True
        os.close(self._sock.detach())


def resolve(endpoint: str | os.PathLike[str] | None, device: str | None) -> Path:
    """The runtime folder to connect to: as given, `$SWAPD_ENDPOINT`, or the device's."""
    if endpoint is not None:
        return Path(endpoint)
    if named := config.endpoint_from_environment():
        return Path(named)
    return config.default_folder(device or "host")


def default_label() -> str:
    """What the log calls this process unless it says otherwise."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{program}:{os.getpid()}"


_alive: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for session in list(_alive):
        session._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)


def _connect(path: Path) -> tuple[socket.socket, int]:
    """A lifeline to the daemon, and the daemon's process id."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(path))
    except PermissionError as exc:
        sock.close()
        raise NotRunning(
            f"{path.parent} belongs to another user, whose swapd serves nobody else "
            f"({exc.strerror}); start one as this user"
        ) from exc
    except OSError as exc:
        sock.close()
        raise NotRunning(
            f"no swapd at {path.parent} ({exc.strerror or exc}). Start one: swapd serve --device "
            f"host --budget 1GiB; or say where it is: connect(path) or ${config.ENDPOINT_VARIABLE}"
        ) from exc
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        sock.close()
        raise NotRunning(
            f"what listens at {path.parent} runs as user {uid}, not as this one: it gets no "
            "weights. Start a swapd as this user, or connect(path) to the right folder"
        )
    return sock, pid


def _layout(source: object, segments: Segments) -> Layout:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        tensors = isinstance(source, torch.nn.Module) or (
            isinstance(source, Mapping)
            and any(isinstance(value, torch.Tensor) for value in source.values())
        )
        if tensors:
            from swapd_client.tensors import TensorLayout

            return TensorLayout(source, segments)  # type: ignore[arg-type]
    if isinstance(source, Mapping):
        return BufferLayout(source, segments)
    raise BadRequest(
        f"cannot register a {type(source).__name__}; give a torch module, or a dict of tensors "
        "or of buffers"
    )
