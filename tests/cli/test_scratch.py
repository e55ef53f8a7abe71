"""What people read of scratch, from a real daemon: what it is, what is copied, what is dropped."""

import json

import pytest

from .conftest import MIB, Running, on_terminal, swapd


def _evict(daemon: Running, size_mib: int) -> None:
    """Have another take all the room there is."""
    other = daemon.client("other", other=size_mib)
    with other.acquire("other"):
        pass
    other.close()


def _said(daemon: Running, name: str) -> list[str]:
    """The readable log of a component, without the times."""
    lines = swapd("log", "--text", "--file", daemon.swap_log).stdout.splitlines()
    return [" ".join(line.split()[1:]) for line in lines if f" {name} " in line]


def test_status_says_scratch(daemon: Running) -> None:
    client = daemon.client("worker", weights=4)
    client.register_scratch("kv", "4MiB")
    text = on_terminal("status", "-e", daemon.folder)
    (line,) = (line for line in text.splitlines() if line.startswith("kv"))
    assert "lru, scratch" in line
    reply = json.loads(swapd("status", "--json", "-e", daemon.folder).stdout)
    assert [c["kind"] for c in reply["components"]] == ["component", "scratch"]


def test_a_forecast_copies_nothing_of_it(daemon: Running) -> None:
    client = daemon.client("worker", weights=12)
    client.register_scratch("kv", "8MiB")
    with client.acquire("weights"):
        pass
    words = ("forecast", "kv", "-e", daemon.folder)
    reply = json.loads(swapd(*words, "--json").stdout)
    assert (reply["bytes_in"], [v["name"] for v in reply["victims"]]) == (0, ["weights"])
    assert "it comes in as zeros" in swapd(*words).stdout


@pytest.mark.parametrize("mutable", [False, True])
def test_the_log_says_what_is_zeroed_dropped_and_copied(daemon: Running, mutable: bool) -> None:
    client = daemon.client("worker")
    kv = client.register_scratch("kv", "8MiB", mutable=mutable)
    with client.acquire("kv"):
        if mutable:
            kv.used([(0, 2 * MIB)])
    _evict(daemon, 16)
    with client.acquire("kv"):
        pass
    client.close()
    daemon.stop()
    said = _said(daemon, "kv")
    came_in = [words for words in said if words.startswith("in ")]
    assert came_in[0].startswith("in kv 8 MiB, zeroed")
    evict = next(words for words in said if words.startswith("evict "))
    if mutable:
        assert evict.startswith("evict kv 8 MiB to make room for other")
        out = next(words for words in said if words.startswith("out "))
        assert out.startswith("out kv 2 MiB ")
        assert out.endswith("of 8 MiB written back")
        assert came_in[1].startswith("in kv 2 MiB ")
        assert came_in[1].endswith("of 8 MiB, the rest zeroed")
    else:
        assert evict.startswith("evict kv 8 MiB dropped, to make room for other")
        assert not any(words.startswith(("out ", "lost ")) for words in said)
        assert came_in[1].startswith("in kv 8 MiB, zeroed")
