"""The client's end of the lifeline: the socket, the handshake, and the thread that reads it."""

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

import msgspec

from swapd.shared import protocol
from swapd.shared.fds import OwnedFd, recv_packet, send_packet
from swapd.shared.system import LimitError, is_alive, start
from swapd_client.errors import (
    DaemonGone,
    SwapdError,
    Timeout,
    VersionMismatch,
    from_refusal,
)
from swapd_client.log import log
from swapd_client.session.endpoint import find, not_answering, open_lifeline

#: Default seconds to wait for the daemon's answer to the hello.
ANSWER_S = 30.0
#: Seconds that a closing client waits until the daemon knows that it has unmapped everything.
LET_GO_S = 2.0
RETRY_S = 0.5

_SAME = "install the same version of swapd on both sides"


class Lifeline:
    """One connection to one daemon. `send` may be called in any thread."""

    def __init__(self, endpoint: Path, answer_s: float = ANSWER_S) -> None:
        """Connect. Raises: NotRunning, Timeout."""
        self._endpoint = endpoint
        self._answer_s = answer_s
        self.folder = find(endpoint)
        #: Wakes the thread for `sweep`, as messages do; it returns the seconds until its next call.
        self._bell = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.sweep: Callable[[], float] = lambda: inf
        try:
            self._sock, self._daemon_pid = open_lifeline(self.folder, answer_s)
        except BaseException:
            self.folder.close()
            self._bell.close()
            raise
        self._thread: threading.Thread | None = None

    def shake_hands(self, label: str) -> tuple[protocol.Welcome, OwnedFd]:
        """Return the welcome, and the board's descriptor, which the caller then owns.

        Raises: DaemonGone, Timeout, VersionMismatch, or the daemon's refusal.
        """
        self._sock.settimeout(self._answer_s)
        self.send(protocol.Hello(protocol.VERSION, label))
        try:
            data, fds = self._recv()
        except TimeoutError as exc:
            raise self.not_answering(self._answer_s) from exc
        if not data:
            raise DaemonGone(
                f"{self._endpoint}: the daemon closed the connection before it answered: it is "
                "ending, or accepts no sessions now; see its log. Connect again"
            )
        try:
            message = protocol.decode_from_daemon(data)
        except msgspec.MsgspecError as exc:
            raise VersionMismatch(
                f"{self._endpoint}: cannot understand the daemon's message ({exc}); {_SAME}"
            ) from exc
        if isinstance(message, protocol.Goodbye):
            raise from_refusal(message)
        if not isinstance(message, protocol.Welcome) or len(fds) != 1:
            raise VersionMismatch(
                f"{self._endpoint}: expected a welcome, got {type(message).__name__}; {_SAME}"
            )
        self._sock.settimeout(None)
        return message, fds[0]

    def listen(
        self,
        on_message: Callable[[protocol.FromDaemon, list[OwnedFd]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Start the thread. `on_message` takes over the descriptors of its message.

        The last call is `on_end(why)`: None if the daemon closed the connection, else the error of
        a message, here or in `on_message`; the connection has been shut then.
        """
        self._thread = threading.Thread(
            target=self._read, args=(on_message, on_end), name="swapd-lifeline", daemon=True
        )
        self._thread.start()

    def send(self, message: protocol.FromClient, fds: Sequence[int] = ()) -> None:
        """Send, unless the connection has ended: `on_end` reports that."""
        with suppress(OSError):
            send_packet(self._sock, protocol.encode(message), fds)

    def try_send(self, data: bytes) -> bool:
        """Send a message, unless it would block. True, too, if the daemon is gone. Later requests
        may overtake it.
        """
        try:
            self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as exc:
            return exc.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
        return True

    def ring(self) -> None:
        """Make the thread call `sweep` now. May be called anywhere."""
        with suppress(ValueError, OSError):  # closed meanwhile
            os.eventfd_write(self._bell.fileno(), 1)

    def not_answering(self, timeout_s: float) -> Timeout:
        return not_answering(self.folder, timeout_s, self._daemon_pid)

    def is_daemon_alive(self) -> bool:
        return is_alive(self._daemon_pid)

    def let_go(self, token: bytes) -> None:
        """After `close`: tell the daemon that nothing of the session is mapped here.

        Blocks until the daemon knows, for LET_GO_S at most. In a thread, because an interrupt could
        lose a descriptor.
        """
        thread = threading.Thread(target=self._let_go, args=(token,), daemon=True)
        with suppress(LimitError):
            start(thread)
            thread.join()

    def _let_go(self, token: bytes) -> None:
        with suppress(SwapdError, OSError):
            with find(self._endpoint) as folder:
                sock, _ = open_lifeline(folder, LET_GO_S)
            with sock:
                sock.settimeout(LET_GO_S)
                send_packet(sock, protocol.encode(protocol.SessionUnmapped(token)))
                sock.recv(1)

    def close(self) -> None:
        """End the connection, and the thread unless it is this one."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()
        self._bell.close()
        self.folder.close()

    def forget(self) -> None:
        """In a forked child: close the descriptor, which would hide the parent's death."""
        os.close(self._sock.detach())
        self._bell.close()

    def _read(
        self,
        on_message: Callable[[protocol.FromDaemon, list[OwnedFd]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        try:
            while True:
                if not self._await_message():
                    continue
                data, fds = self._recv()
                if not data:
                    break
                on_message(protocol.decode_from_daemon(data), fds)
        except Exception as exc:  # noqa: BLE001 - after any error no message can be read
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # so that the daemon does not wait for us
            on_end(exc)
        else:
            on_end(None)

    def _await_message(self) -> bool:
        """Sweep, then wait for a message, the bell or the next sweep. True if a message came."""
        try:
            after_s = self.sweep()
        except Exception:  # the next sweep finds what this one missed
            log.exception("%s: cannot give back leases that nobody uses", self._endpoint)
            after_s = RETRY_S
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._bell.fileno(), select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if after_s == inf else after_s * 1000)]
        if self._bell.fileno() in ready:
            os.eventfd_read(self._bell.fileno())
        return self._sock.fileno() in ready

    def _recv(self) -> tuple[bytes, list[OwnedFd]]:
        try:
            return recv_packet(self._sock, protocol.LIFELINE_MAX_BYTES)
        except ConnectionResetError:
            # the daemon had not read all our messages: this error comes once, then its last
            # messages
            return recv_packet(self._sock, protocol.LIFELINE_MAX_BYTES)
