"""A daemon with one client or two, for tests of a client in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from swapd import spawn
from swapd_client import Client, connect


@contextmanager
def alone(**settings: object) -> Iterator[tuple[spawn.Spawned, Client]]:
    with spawn.daemon(**settings) as daemon, connect(daemon.folder) as client:
        yield daemon, client


@contextmanager
def pair(
    one: str | None = None, two: str | None = None, **settings: object
) -> Iterator[tuple[spawn.Spawned, Client, Client]]:
    """`one`, `two`: the labels of the clients."""
    with (
        spawn.daemon(**settings) as daemon,
        connect(daemon.folder, label=one) as first,
        connect(daemon.folder, label=two) as second,
    ):
        yield daemon, first, second
