"""A client that was closed may be closed again: by its `with` block, say."""

from .conftest import Running


def test_closed_twice_is_closed_once(daemon: Running) -> None:
    client = daemon.client("worker", thinker=2)
    with client:
        client.close()
