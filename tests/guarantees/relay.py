"""A runtime folder in front of a daemon's: a client connects through it, and knows no difference.

A test withholds messages of the daemon there, or sends others.
"""

import select
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from swapd.shared import protocol, runtime_dir
from swapd.shared.fds import recv_packet, send_packet


class Relay:
    """Passes the packets of one client's lifeline on; requests and replies go past it."""

    def __init__(
        self, folder: Path, daemon: Path, withhold: type[protocol.FromDaemon] | None = None
    ) -> None:
        """Make `folder`, for a client of this process. `withhold`: messages not to pass on."""
        folder.mkdir(mode=0o700)
        (folder / runtime_dir.RPC).symlink_to(daemon / runtime_dir.RPC)
        self.folder = folder
        self._withhold = withhold
        #: Set when the first message is withheld.
        self.withheld = threading.Event()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(folder / runtime_dir.LIFELINE))
        self._door.listen(1)
        self._daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._daemon.connect(str(daemon / runtime_dir.LIFELINE))
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After the client is closed."""
        self._thread.join()
        for sock in (self._door, self._daemon, self._client):
            if sock is not None:
                sock.close()

    def send_garbage(self) -> None:
        """Send the client a message that none of the daemon's is like."""
        assert self._client is not None
        send_packet(self._client, b"garbage")

    def _run(self) -> None:
        self._client, _ = self._door.accept()
        other = {self._client: self._daemon, self._daemon: self._client}
        while True:
            for source in select.select([*other], [], [])[0]:
                data, fds = recv_packet(source, protocol.LIFELINE_MAX_BYTES)
                if not data:
                    other[source].shutdown(socket.SHUT_RDWR)
                    return
                if source is self._client or not self._is_withheld(data):
                    send_packet(other[source], data, [fd.fileno() for fd in fds])
                for fd in fds:
                    fd.close()

    def _is_withheld(self, data: bytes) -> bool:
        if self._withhold is None:
            return False
        withheld = isinstance(protocol.decode_from_daemon(data), self._withhold)
        if withheld:
            self.withheld.set()
        return withheld
