"""A prefetch that names its victims, from the client, against a real daemon."""

from collections.abc import Collection

import pytest

from swapd import spawn
from swapd_client import connect
from tests.contents import bytes_of


@pytest.mark.parametrize("over", [["vae", "nothing"], "vae"])
def test_nothing_goes_but_what_is_named_and_names_that_are_not_there_are_left_out(
    over: Collection[str],
) -> None:
    with spawn.daemon(budget="8MiB") as daemon, connect(daemon.folder) as client:
        for name in ("b", "vae"):  # b was used longer ago
            client.register(name, {"x": bytes_of(name, 4 << 20)})
            client.acquire(name).release()
        client.register("c", {"x": bytes_of("c", 4 << 20)})
        client.prefetch("c", "nobody", over=over)
        client.acquire("c").release()
        assert client.status().evictions == 1
        states = {one.name: one.state for one in client.status().components}
    assert states["vae"] == "absent"
    assert "absent" not in (states["b"], states["c"])
