"""Settings kept for a model; samples of the memory that a command uses."""

import json
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swapd.run import kept
from swapd.run.kept import CannotKeep, Kept
from swapd.run.sampling import Sampler, descendants, host_bytes
from swapd.run.settings import Settings

MIB = 1 << 20
SETTINGS = Settings(("cuda:0",), 40 << 30, "80GiB", (("chunk", "64MiB"),))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "swapd"


def one(when: float = 1.0) -> Kept:
    return Kept(SETTINGS, "0.5 times the time without swapd", when)


# --- settings ----------------------------------------------------------------------------


def test_what_is_kept_is_read_again_and_is_for_this_user_alone(state: Path) -> None:
    assert kept.all_of(state) == {}
    kept.keep(state, "org/model", one())
    kept.keep(state, "other", one(2.0))
    assert kept.all_of(state) == {"org/model": one(), "other": one(2.0)}
    assert stat.S_IMODE((state / kept.NAME).stat().st_mode) == 0o600
    assert sorted(path.name for path in state.iterdir()) == [kept.NAME, kept.LOCK]
    assert kept.forget(state, "other")
    assert not kept.forget(state, "other")
    assert SETTINGS.options == (
        "--device cuda:0 --budget 40GiB --device-memory 80GiB --set chunk=64MiB"
    )


def test_the_oldest_goes_when_the_file_is_full(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MODELS_MAX", 2)
    for when, model in enumerate(("a", "b", "a", "c")):
        kept.keep(state, model, one(float(when)))
    assert list(kept.all_of(state)) == ["a", "c"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"version":1,"models":{"m":', "is not a file of swapd"),
        (b"", "is not a file of swapd"),
        (b'{"version":1,"models":{"m":3}}', "is not a file of swapd"),
        (b'{"version":2,"models":{"m":3},"more":[]}', "is of version 2, and this swapd reads 1"),
        (b" " * (MIB + 1), "is not a file of swapd"),
    ],
)
def test_a_file_that_cannot_be_read_is_neither_used_nor_overwritten(
    state: Path, data: bytes, said: str
) -> None:
    state.mkdir(parents=True)
    (state / kept.NAME).write_bytes(data)
    for touch in (
        lambda: kept.all_of(state),
        lambda: kept.keep(state, "m", one()),
        lambda: kept.forget(state, "m"),
    ):
        with pytest.raises(CannotKeep, match=said):
            touch()
    assert (state / kept.NAME).read_bytes() == data


def test_links_fifos_and_files_of_others_are_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir(parents=True)
    (state / "else").write_text(json.dumps({"version": 1, "models": {}}))
    (state / kept.NAME).symlink_to("else")
    with pytest.raises(CannotKeep, match="cannot be used"):
        kept.all_of(state)
    (state / kept.NAME).unlink()
    os.mkfifo(state / kept.NAME)
    with pytest.raises(CannotKeep, match="is not a file of swapd"):
        kept.all_of(state)
    (state / kept.NAME).unlink()
    kept.keep(state, "m", one())
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(CannotKeep, match="belongs to user"):
        kept.all_of(state)


def _keep_some(state: Path, name: str) -> None:
    for number in range(20):
        kept.keep(state, f"{name}{number}", one(number))


def test_runs_at_the_same_time_lose_nothing_of_each_other(state: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_keep_some, args=(state, name)) for name in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert len(kept.all_of(state)) == 40


# --- samples -----------------------------------------------------------------------------

_HOLDS = """
import os, sys
own = bytearray(os.urandom(1) * (32 << 20))
if os.fork():
    print("holds", flush=True)
sys.stdin.read()
"""


def test_private_memory_of_all_processes_counts_and_shared_memory_once() -> None:
    shared = os.memfd_create("shared")
    os.write(shared, bytes(64 * MIB))
    before = host_bytes(descendants(os.getpid()))
    sampler = Sampler(["host"])
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[shared],
    )
    os.close(shared)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"holds\n"
        assert len(descendants(process.pid)) == 1
        sampler.sample()
        assert sampler.host_bytes is not None
        took = sampler.host_bytes - before
        assert 32 * MIB + 64 * MIB <= took < 2 * 32 * MIB + 2 * 64 * MIB
        assert sampler.due > 0
        assert sampler.device_bytes is None, "measured without a GPU"
    process.wait(60)


def test_of_a_gpu_it_is_what_is_used_on_top_of_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: [100, 300, 250], 1: [10, 10, 40]}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda number: SimpleNamespace(used=used[number].pop(0)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = Sampler(["cuda:0", "cuda:1"])
    for _ in range(2):
        sampler.due = 0.0
        sampler.sample()
    assert sampler.device_bytes == 200
    sampler.due = 0.0
    sampler.sample()  # the library fails: earlier samples stay
    assert sampler.device_bytes == 200
