"""`swapd pin`, `unpin` and `evict`, on a daemon that swaps."""

import json

import swapd_client

from .conftest import MIB, Running, on_terminal, swapd


def loads(client: swapd_client.Client, name: str) -> int:
    return next(c.loads for c in client.status().components if c.name == name)


def test_what_is_pinned_stays_whatever_others_need(daemon: Running) -> None:
    client = daemon.client("worker", talker=6, vae=6, dit=6)
    client.acquire("talker").release()
    assert swapd("pin", "talker", "-e", daemon.folder).stdout == "talker: 6 MiB stays\n"
    assert "pinned" in swapd("status", "-e", daemon.folder).stdout
    for name in ("vae", "dit", "vae", "talker"):
        client.acquire(name).release()
    assert loads(client, "talker") == 1
    shown = swapd("unpin", "talker", "-e", daemon.folder).stdout
    assert shown == "talker: may be evicted\n"
    for name in ("vae", "dit", "talker"):
        client.acquire(name).release()
    assert loads(client, "talker") == 2


def test_what_is_pinned_waits_for_room_without_end(daemon: Running) -> None:
    """A prefetch of a client is dropped after a while."""
    client = daemon.client("worker", talker=6)
    swapd("pin", "talker", "-e", daemon.folder)
    client.prefetch("talker")
    log = swapd("log", "-e", daemon.folder, "--json").stdout.splitlines()
    asked = [json.loads(line) for line in log if '"kind":"prefetch"' in line]
    assert ["timeout_s" in record for record in asked] == [False, True]


def test_an_idle_component_leaves_when_it_is_told_to(daemon: Running) -> None:
    client = daemon.client("worker", talker=6)
    client.acquire("talker").release()
    with client.acquire("talker"):
        refused = swapd("evict", "talker", "-e", daemon.folder, status=1).stderr
        assert "'talker' is leased by worker" in refused
    client.status()  # each request returns the leases that the client keeps for its next step
    with swapd_client.connect(daemon.folder, label="other") as other:
        swapd("pin", "talker", "-e", daemon.folder)
        assert "is pinned" in swapd("evict", "talker", "-e", daemon.folder, status=1).stderr
        other.unpin("talker")
    assert swapd("evict", "talker", "-e", daemon.folder).stdout == "talker: is out\n"
    assert "asked for" in on_terminal("log", "-e", daemon.folder)
    assert client.status().used_bytes == 0


def test_what_cannot_be_pinned_is_said_in_one_line(daemon: Running) -> None:
    daemon.client("worker", talker=10, vae=10)
    done = swapd("pin", "talker", "-e", daemon.folder, status=1)
    assert "vae would not fit any more; the budget is 16 MiB" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = swapd("pin", "talkr", "-e", daemon.folder, status=1)
    assert "did you mean 'talker'?" in done.stderr


def test_bytes_that_were_written_are_saved_when_it_leaves(daemon: Running) -> None:
    with swapd_client.connect(daemon.folder) as client:
        part = client.register("state", {"w": bytearray(2 * MIB)}, mutable=True)
        with client.acquire("state"):
            part.view("w")[:3] = b"now"
        swapd("evict", "state", "-e", daemon.folder)
        with client.acquire("state"):
            assert bytes(part.view("w")[:3]) == b"now"
