"""ZMTP 3.0, the protocol of ZeroMQ sockets, as far as a daemon needs it. Handles bytes, not
sockets.

The daemon does not use libzmq, which takes memory and descriptors before the daemon can ask for
whom, does not limit frames or subscriptions, and aborts the process if it lacks memory, a thread or
a descriptor. This module checks each limit before it keeps a byte.
"""

from collections.abc import Collection

#: Frames of one message at most.
FRAMES_MAX = 8
#: Bytes of one command at most, also in the handshake.
COMMAND_MAX_BYTES = 2048

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_MECHANISM = b"NULL".ljust(20, b"\0")

#: First bytes of each side: signature, version 3.0, no security, no server.
GREETING = (b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM).ljust(_GREETING_BYTES, b"\0")


class WireError(Exception):
    """The peer does not speak ZMTP 3, or sends more at once than it may."""


def frame(payload: bytes) -> bytes:
    return _header(0, len(payload)) + payload


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    """Return the command that ends the handshake. `kind` is the socket's, such as b"ROUTER"."""
    properties = _property(b"Socket-Type", kind) + _property(b"Identity", identity)
    return _command(b"READY", properties)


class Decoder:
    def __init__(self, kinds: Collection[bytes], longest: int) -> None:
        """`kinds`: sockets that may connect; `longest`: most bytes of one of their messages."""
        self._kinds = kinds
        self._longest = longest
        self._buffer = bytearray()
        self._at = 0
        self._greeted = False
        #: Frames of an incomplete message, and their bytes.
        self._frames: list[bytes] = []
        self._nbytes = 0
        #: Routing id, once the handshake is over.
        self.identity: bytes | None = None
        #: Answers of the protocol itself, for the caller to send.
        self.answers: list[bytes] = []

    @property
    def kept(self) -> int:
        return len(self._buffer) - self._at + self._nbytes

    def feed(self, data: bytes) -> None:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if it is incomplete. Raises: WireError."""
        if not self._greeted and not self._greet():
            return None
        while (found := self._next_frame()) is not None:
            flags, body = found
            if flags & _COMMAND:
                self._obey(body)
                continue
            if self.identity is None:
                raise WireError("a message before the handshake")
            self._frames.append(body)
            self._nbytes += len(body)
            if not flags & _MORE:
                message, self._frames, self._nbytes = self._frames, [], 0
                return message
        return None

    def _greet(self) -> bool:
        begin = bytes(self._buffer[:11])
        if begin[:1] not in (b"", b"\xff") or (len(begin) > 9 and not begin[9] & 1):
            raise WireError("no ZeroMQ socket")
        if len(begin) > 10 and begin[10] < 3:
            raise WireError(f"ZMTP {begin[10]}, which is older than 3")
        if len(self._buffer) < _GREETING_BYTES:
            return False
        if self._buffer[12:32] != _MECHANISM:
            raise WireError("a security mechanism that swapd does not have")
        self._at, self._greeted = _GREETING_BYTES, True
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer, at = self._buffer, self._at
        if len(buffer) < at + 2:
            return None
        flags = buffer[at]
        if flags & _LONG:
            body = at + 9
            if len(buffer) < body:
                return None
            size = int.from_bytes(buffer[at + 1 : body], "big")
        else:
            body = at + 2
            size = buffer[at + 1]
        self._check(flags, size)
        if len(buffer) < body + size:
            return None
        self._at = body + size
        return flags, bytes(buffer[body : self._at])

    def _check(self, flags: int, size: int) -> None:
        """Check a frame before its bytes are kept."""
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise WireError(f"a frame with the flags {flags:#x}")
        if flags & _COMMAND:
            if size > COMMAND_MAX_BYTES:
                raise WireError(f"a command of {size} bytes; at most {COMMAND_MAX_BYTES}")
        elif self._nbytes + size > self._longest:
            raise WireError(f"a message of more than {self._longest} bytes")
        elif len(self._frames) >= FRAMES_MAX:
            raise WireError(f"a message of more than {FRAMES_MAX} frames")

    def _obey(self, body: bytes) -> None:
        name, rest = _short(body)
        if name == b"READY" and self.identity is None:
            properties = _properties(rest)
            kind = properties.get(b"socket-type", b"")
            if kind not in self._kinds:
                raise WireError(f"a socket of kind {kind[:20]!r}")
            self.identity = properties.get(b"identity", b"")
        elif name == b"PING" and self.identity is not None:
            self.answers.append(_command(b"PONG", rest[2:18]))  # two bytes are the time to live
        elif name == b"ERROR" or self.identity is None:
            raise WireError(f"the command {name[:20]!r} in the handshake")


def _header(flags: int, size: int) -> bytes:
    if size < 256:
        return bytes((flags, size))
    return bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def _command(name: bytes, rest: bytes) -> bytes:
    body = bytes((len(name),)) + name + rest
    return _header(_COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _short(data: bytes) -> tuple[bytes, bytes]:
    """Return the string after one byte of length, and the bytes after it."""
    if not data or len(data) < 1 + data[0]:
        raise WireError("a command cut short")
    return data[1 : 1 + data[0]], data[1 + data[0] :]


def _properties(data: bytes) -> dict[bytes, bytes]:
    found = {}
    while data:
        name, data = _short(data)
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            raise WireError("a property cut short")
        found[name.lower()] = data[4 : 4 + size]
        data = data[4 + size :]
    return found
