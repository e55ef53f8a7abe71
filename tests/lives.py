"""A client of daemons that die, one after the other."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import swapd_client
from swapd_client import Client
from tests.guarantees.harness import Daemon


class Lives:
    """Daemons in one folder, one after the other; each has 16 MiB and is strict."""

    def __init__(self, folder: Path, reconnect: float | None) -> None:
        """`reconnect`: of its client, and of those of `connect`."""
        self.reconnect = reconnect
        self._folder = folder
        self._daemons: list[Daemon] = []
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self.start()
        self.client = self.connect()

    @property
    def daemon(self) -> Daemon:
        return self._daemons[-1]

    def connect(self) -> Client:
        """A client that is closed with this, unless it is collected before."""
        endpoint = self._folder / "d"
        client = swapd_client.connect(endpoint, label="client", reconnect=self.reconnect)
        self._clients.add(client)
        return client

    def start(self, **settings: object) -> None:
        self._daemons.append(Daemon(self._folder / "d", self._folder / "log", **settings))

    def kill(self, *clients: Client) -> None:
        """Kill it, and wait until the clients know."""
        self.daemon.kill()
        for client in clients or [self.client]:
            client.session.life.await_end()

    def next(self, **settings: object) -> None:
        self.kill()
        self.start(**settings)

    def lose(self) -> None:
        """Kill the daemon, and close the client."""
        self.daemon.kill()
        self.client.close()

    def again(self, **settings: object) -> Client:
        """Lose the daemon; the client of the next one."""
        self.lose()
        self.start(**settings)
        self.client = self.connect()
        return self.client

    def names(self) -> set[str]:
        """The components that the daemon has."""
        return {component.name for component in self.daemon.status().components}

    def close(self) -> None:
        for client in list(self._clients):
            client.close()
        for daemon in self._daemons:
            daemon.close()

    def discard(self) -> None:
        for daemon in self._daemons:
            daemon.discard()


@contextmanager
def living(reconnect: float | None = None) -> Iterator[Lives]:
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    made = Lives(folder, reconnect)
    try:
        yield made
        made.close()
    finally:
        made.discard()
        shutil.rmtree(folder)
