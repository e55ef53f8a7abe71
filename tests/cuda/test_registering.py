"""Weights on the GPU are copied to their host copy through a few pinned places."""

from collections import Counter
from pathlib import Path

import pytest

from swapd_client.session.gpu.fetching import PLACE_BYTES, PLACES
from tests.cuda.gpu_world import MIB, Worker, WorkerError, World

PIN, FETCH = "cuMemHostAlloc", "cuMemcpyDtoHAsync"
SAID = "no memory can be pinned for them here"
#: No multiple of the size of a place, and one size below it.
SIZES = 9 * PLACE_BYTES + 12345, 777


def calls(trace: Path, worker: Worker) -> list[str]:
    """The worker's calls, in order."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [name.removesuffix("_v2") for pid, _, name, *_ in lines if int(pid) == worker.pid]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    path.touch()
    monkeypatch.setenv("FAKECUDA_TRACE", str(path))
    return path


def test_every_byte_comes_and_no_second_copy_is_made_of_it(world: World, trace: Path) -> None:
    _, worker = world.alone(budget="64MiB")
    expected, peak = worker.register_from_gpu("a", *SIZES)
    named = calls(trace, worker)
    made = Counter(named)
    assert named.index("cuCtxSynchronize") < named.index(FETCH), "whoever wrote it is done"
    assert (made[PIN], made["cuMemFreeHost"]) == (1, 1)
    assert made["cuMemHostRegister"] == 0, "the host copy is the daemon's to pin"
    assert made[FETCH] == 10 + 1
    assert made["cuEventCreate"] == made["cuEventDestroy"] == PLACES
    assert worker.use("a")[1] == expected
    # the host copy, mapped during the registration, and the places
    assert peak < SIZES[0] + PLACES * PLACE_BYTES + 8 * MIB


def test_without_pinned_memory_it_is_copied_all_the_same_and_said_once(world: World) -> None:
    _, worker = world.alone(budget="64MiB")
    world.fake.faults(f"{PIN} 2 pid={worker.pid}")
    for name in "ab":
        expected, _ = worker.register_from_gpu(name, PLACE_BYTES + 5, 3)
        assert worker.use(name)[1] == expected
    assert worker.log.count(SAID) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in worker.log


def test_a_copy_that_fails_leaves_the_source_and_nothing_else(world: World) -> None:
    """It can be registered again."""
    daemon, worker = world.alone(budget="64MiB")
    sizes = 3 * PLACE_BYTES + 12345, 777
    worker.register("small", MIB, seed=3)
    for fault in FETCH, "cuEventSynchronize", "cuEventCreate":
        world.fake.faults(f"{fault} 999 times=1 after=2 pid={worker.pid}")
        with pytest.raises(WorkerError, match=f"DeviceFailed: .*{fault}"):
            worker.register_from_gpu("a", *sizes)
        assert [c.name for c in daemon.status().components] == ["small"]
    expected, _ = worker.register_from_gpu("a", *sizes)
    assert worker.use("a")[1] == expected
