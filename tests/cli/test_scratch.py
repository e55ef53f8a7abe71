"""Status and log of a real daemon say how scratch is kept, copied and dropped."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from swapd_client import connect
from tests.guarantees.harness import Daemon

from .conftest import MIB, Running, on_terminal, swapd


def _evict(daemon: Running, size_mib: int) -> None:
    """Let another component take the whole budget."""
    other = daemon.client("other", other=size_mib)
    other.acquire("other").release()
    other.close()


def _said(daemon: Running, name: str) -> list[str]:
    """The readable log of a component, without the times."""
    lines = swapd("log", "--file", daemon.swap_log).stdout.splitlines()
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
    client.acquire("weights").release()
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
    client.acquire("kv").release()
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


def test_the_log_of_a_turn_says_what_came_in_by_part_and_what_became_of_the_cache(
    daemon: Running,
) -> None:
    client = daemon.client("stage")
    for number in range(3):
        client.register(
            f"layer {number}", {"w": torch.full((MIB // 4,), float(number))}, part_of="weights"
        )
    kv = client.register_scratch("kv", "8MiB", mutable=True)
    for used in ([(0, 2 * MIB)], [], [(0, MIB)]):
        with client.acquire("weights", "kv"):
            kv.used(used)
        _evict(daemon, 16 if used else 14)
    client.close()
    daemon.stop()
    said = swapd("log", "--file", daemon.swap_log).stdout.splitlines()
    turns = [line.partition(": ")[2] for line in said if " granted " in line and "kv" in line]
    assert turns == [
        "weights 3 MiB in 3 of 3 parts, kv 8 MiB of zeros",
        "weights 3 MiB in 3 of 3 parts, kv 2 MiB of 8 MiB restored",
        "weights 2 MiB in 2 of 3 parts, kv 8 MiB of zeros",
    ]
    evicted = [words for words in _said(daemon, "kv") if words.startswith("evict ")]
    assert "dropped, as none of it is used, to make room for other" in evicted[1]


def test_the_log_says_why_a_cache_is_lost(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    daemon = Daemon(folder / "d", tmp_path / "log", program="tests.guarantees.failing_saves")
    try:
        with connect(daemon.folder) as client, connect(daemon.folder) as other:
            kv = client.register_scratch("kv", "8MiB", mutable=True)
            other.register("other", {"w": torch.ones(4 * MIB)})
            with client.acquire("kv"):
                kv.used([(0, 2 * MIB)])
            other.acquire("other").release()
            with client.acquire("kv") as lease:
                assert lease.fresh("kv")
        said = swapd("log", "kv", "--file", daemon.swap_log).stdout
        assert "lost kv " in " ".join(said.split())
        assert "the bus has failed" in said
        daemon.close()
    finally:
        daemon.discard()
        shutil.rmtree(folder)
