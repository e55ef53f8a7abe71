"""Features of the CUDA device alone: all errors at the start, failures of calls half way, a lost
device, and that nothing of it is left.
"""

import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swapd.device import ChunksMissing, DeviceError, cuda, open_device, streams
from swapd.device.cuda import CudaDevice
from swapd.device.driver import Driver
from swapd.shared import vm
from tests import fakecuda
from tests.device import backends
from tests.device.backends import CHUNK, HostBytes
from tests.processes import line_of, output_of, start_python

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "programs" / "cuda_device.py"


@cache
def start_forking(libraries: str) -> None:
    """Start the processes that fork the programs of these tests; their sockets stay open."""
    output_of("pass")
    output_of("pass", env={"LD_LIBRARY_PATH": libraries, "FAKECUDA_DIR": ""})


@pytest.fixture(autouse=True)
def nothing_is_left(fake: fakecuda.Fake) -> Iterator[None]:
    CudaDevice(0, CHUNK, CHUNK).close()  # files that a driver opens only once
    start_forking(fake.environment()["LD_LIBRARY_PATH"])
    before = sorted(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    fake.faults()
    assert fake.allocations() == []
    assert (sorted(os.listdir("/proc/self/fd")), set(threading.enumerate())) == before


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def goes_in_and_out(device: CudaDevice, nbytes: int = CHUNK) -> bool:
    runs = ((0, -(-nbytes // device.chunk_bytes)),)
    source, target = HostBytes(nbytes, noise(nbytes)), HostBytes(nbytes)
    device.copy_in(runs, source.address, nbytes)
    device.copy_out(runs, target.address, nbytes)
    return bytes(target) == bytes(source)


# --- names -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda0"])
def test_a_gpu_is_opened_by_name(name: str) -> None:
    with closing(open_device(name, 2 * CHUNK + 1, CHUNK, None, CHUNK)) as device:
        assert (device.name, device.chunks, device.chunks_per_file) == ("cuda:0", 2, 1)
        assert device.uuid.startswith("GPU-")
        assert not device.read_only_pins
        assert repr(device) == "<CudaDevice cuda:0 <Arena 4 MiB in 2 chunks, 0 lent>>"


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "cudax", "gpu", ""])
def test_a_name_that_is_none_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(DeviceError, match="host, cuda or cuda:0"):
        open_device(name, CHUNK, CHUNK, None)


def test_a_gpu_cannot_be_slowed_down() -> None:
    with pytest.raises(DeviceError, match="--bandwidth"):
        open_device("cuda", CHUNK, CHUNK, 1e9)


# --- errors at the start -----------------------------------------------------------------


def test_a_chunk_that_the_gpu_does_not_allocate_is_refused_with_one_that_it_does() -> None:
    with pytest.raises(DeviceError, match=r"chunk of 3145728 bytes: cuda:0 \(.*--chunk 2MiB"):
        CudaDevice(0, 32 * MIB, 3 * MIB)


def test_a_budget_larger_than_the_card_is_refused_with_both_numbers() -> None:
    with pytest.raises(DeviceError, match=r"1 TiB .* cuda:0 .* 256 MiB"):
        CudaDevice(0, 1 << 40, CHUNK)


def test_a_budget_larger_than_what_is_free_is_refused_with_who_has_the_rest(
    fake: fakecuda.Fake,
) -> None:
    with (
        start_python("import sys; print('here', flush=True); sys.stdin.read()") as other,
        fake.occupied(150 * MIB, pid=other.pid),
    ):
        line_of(other)  # a process that is just starting has no name for a moment
        with pytest.raises(
            DeviceError,
            match=rf"200 MiB.* 106 MiB of the 256 MiB of cuda:0.*{other.pid}.* 150 MiB.*106MiB",
        ):
            CudaDevice(0, 200 * MIB, CHUNK)


def test_who_has_the_rest_is_not_always_known(fake: fakecuda.Fake) -> None:
    with fake.occupied(255 * MIB), pytest.raises(DeviceError) as refused:
        CudaDevice(0, 2 * CHUNK, CHUNK)
    assert str(refused.value).endswith("; end processes on it")


def test_memory_that_is_gone_when_it_is_taken_is_told_the_same_way(fake: fakecuda.Fake) -> None:
    fake.faults("cuMemCreate 2 after=3")
    with pytest.raises(DeviceError, match=r"16 MiB.*CUDA_ERROR_OUT_OF_MEM"):
        CudaDevice(0, 8 * CHUNK, CHUNK)


@pytest.mark.parametrize(
    "ability",
    ["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"],
)
def test_a_gpu_whose_memory_cannot_be_shared_is_refused(
    monkeypatch: pytest.MonkeyPatch, ability: str
) -> None:
    monkeypatch.setattr(Driver, "attribute", lambda self, name: name != ability)
    with pytest.raises(DeviceError, match=f"{ability} is 0.*--device host"):
        CudaDevice(0, CHUNK, CHUNK)


def test_too_few_descriptors_are_asked_for_and_if_need_be_demanded(fake: fakecuda.Fake) -> None:
    limits, said = output_of(PROGRAM, "with_few_descriptors", env=fake.environment()).splitlines()
    assert limits == "300 300"
    found = re.search(r"100 chunks need (\d+) open files, and this process may have 300", said)
    assert found is not None
    assert 356 < int(found[1]) < 400
    assert f"`ulimit -n {found[1]}`" in said


STEPS = [
    "cuDevicePrimaryCtxRetain",
    "cuMemGetInfo",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
    "cuStreamCreate",
    "cuEventCreate",
    "cuMemHostAlloc",
]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_start_that_fails_at_any_step_leaves_nothing(
    fake: fakecuda.Fake, step: str, after: int
) -> None:
    fake.faults(f"{step} 304 after={after} times=1")
    try:
        CudaDevice(0, 4 * CHUNK, CHUNK).close()
    except DeviceError as exc:
        assert re.search(rf"CUDA_ERROR_OPERATING_SYSTEM \(304\) in {step}", str(exc))  # noqa: PT017
    else:
        assert after, "the step is not taken"


def test_no_pinned_memory_at_all_is_refused_with_what_to_raise(fake: fakecuda.Fake) -> None:
    fake.faults("cuMemHostAlloc 2")
    with pytest.raises(DeviceError, match=r"staging .*`ulimit -l`"):
        CudaDevice(0, CHUNK, CHUNK)


def test_a_device_that_is_closed_has_freed_what_it_copied_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake driver refuses to free what is not there, so the numbers are enough."""
    calls: Counter[str] = Counter()
    call = Driver.call

    def counting(driver: Driver, function: Callable[..., Any], *arguments: Any) -> Any:
        calls[function.__name__] += 1
        return call(driver, function, *arguments)

    monkeypatch.setattr(Driver, "call", counting)
    CudaDevice(0, CHUNK, CHUNK).close()
    assert calls["cuStreamCreate"] == calls["cuStreamDestroy"] > 0
    assert calls["cuEventCreate"] == calls["cuEventDestroy"] > 0
    assert calls["cuMemHostAlloc"] == calls["cuMemFreeHost"] > 0


# --- copies ------------------------------------------------------------------------------


def test_large_copies_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    memory = vm.map_anonymous(16 * MIB)
    with closing(CudaDevice(0, 16 * MIB, 8 * MIB)) as device:
        device.pin(memory, 16 * MIB, writable=True)
        monkeypatch.setattr(cuda, "PIECE_BYTES", 3 * MIB)
        device.copy_in(((0, 2),), memory, 10 * MIB + 1, landed=told.append)
    vm.free(memory, 16 * MIB)
    assert told == [3 * MIB, 6 * MIB, 8 * MIB, 10 * MIB + 1]


@pytest.mark.parametrize("pinned", [False, True])
def test_no_more_than_a_few_pieces_are_on_the_stream(
    monkeypatch: pytest.MonkeyPatch, *, pinned: bool
) -> None:
    most = streams.DEPTH
    chunks = most + 8
    enqueue = streams.Inward._enqueue
    enqueued: list[streams.Copy] = []
    #: Pieces on the stream as each one has landed, itself included.
    flying: list[int] = []

    def note(self: streams.Inward, copy: streams.Copy, staging: int | None) -> None:
        enqueued.append(copy)
        enqueue(self, copy, staging)

    monkeypatch.setattr(streams.Inward, "_enqueue", note)
    nbytes = chunks * CHUNK
    source = vm.map_anonymous(nbytes)
    with closing(CudaDevice(0, nbytes, CHUNK)) as device:
        if pinned:
            device.pin(source, nbytes, writable=True)
        device.copy_in(
            ((0, chunks),),
            source,
            nbytes,
            landed=lambda _: flying.append(len(enqueued) - len(flying)),
        )
        device.unpin(source)
    vm.free(source, nbytes)
    assert flying == [most] * 8 + list(range(most, 0, -1))


def test_one_direction_does_not_wait_for_the_other(fake: fakecuda.Fake) -> None:
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device, ThreadPoolExecutor(1) as thread:
        source, target = HostBytes(2 * CHUNK, noise(2 * CHUNK)), HostBytes(CHUNK)
        fake.faults("cuMemcpyHtoDAsync hold async")
        copy = thread.submit(device.copy_in, ((0, 2),), source.address, source.nbytes)
        device.copy_out(((3, 1),), target.address, CHUNK)
        assert not copy.done()
        fake.faults()
        copy.result()


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_call_that_fails_in_a_copy_fails_that_copy_alone(
    fake: fakecuda.Fake, call: str, after: int
) -> None:
    source = HostBytes(8 * CHUNK)
    told: list[int] = []
    with closing(CudaDevice(0, 8 * CHUNK, CHUNK)) as device:
        fake.faults(f"{call} 304 after={after} times=1")
        with pytest.raises(DeviceError, match=rf"OPERATING_SYSTEM \(304\) in {call}"):
            device.copy_in(((0, 8),), source.address, source.nbytes, landed=told.append)
        assert told == sorted(told)
        assert all(n < source.nbytes for n in told)
        assert goes_in_and_out(device, 8 * CHUNK)


def test_a_copy_that_failed_has_let_go_of_its_memory(fake: fakecuda.Fake) -> None:
    """A caller that gets the failure may unmap the source at once."""

    def landed(n: int) -> None:
        raise ZeroDivisionError

    source = HostBytes(4 * CHUNK)
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device, ThreadPoolExecutor(1) as thread:
        fake.faults("cuMemcpyHtoDAsync hold async after=1")
        copy = thread.submit(
            device.copy_in, ((0, 4),), source.address, source.nbytes, landed=landed
        )
        done, _ = wait([copy], timeout=0.2)
        assert not done, "three pieces are still on the stream"
        fake.faults()
        with pytest.raises(ZeroDivisionError):
            copy.result()


# --- lend and reclaim --------------------------------------------------------------------


def test_a_lent_chunk_is_not_exported() -> None:
    with closing(CudaDevice(0, 2 * CHUNK, CHUNK)) as device:
        device.lend(((1, 1),))
        with pytest.raises(DeviceError, match="chunk 1 is lent"):
            device.export(1, writable=False)
        device.export(0, writable=False).close()
        assert repr(device) == "<CudaDevice cuda:0 <Arena 4 MiB in 2 chunks, 1 lent>>"


def test_lent_memory_is_the_driver_s_when_the_last_worker_lets_go(fake: fakecuda.Fake) -> None:
    """Also when that worker is killed."""
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device:
        free = fake.free_bytes()
        with device.export(2, writable=False) as fd:
            arguments = backends.cuda({}).arguments("keep", device, fd.fileno(), 2, False)
            child = start_python(
                backends.PROGRAM, *arguments, fds=[fd.fileno()], env=fake.environment()
            )
        with child:
            assert line_of(child) == "mapped\n"
            device.lend(((1, 2),))
            assert fake.free_bytes() == free + CHUNK, "one of them is still mapped elsewhere"
            child.send_signal(signal.SIGKILL)
        assert fake.free_bytes() == free + 2 * CHUNK
        device.reclaim(((1, 2),))
        assert fake.free_bytes() == free
        assert goes_in_and_out(device, 4 * CHUNK)


def test_what_there_is_memory_for_is_taken_back(fake: fakecuda.Fake) -> None:
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device:
        free = fake.free_bytes()
        device.lend(((0, 2), (3, 1)))
        with (
            fake.occupied(fake.free_bytes() - 2 * CHUNK),
            pytest.raises(ChunksMissing, match=r"cuda:0 .* out of memory .* 0 B ") as out,
        ):
            device.reclaim(((0, 2), (3, 1)))
        assert (out.value.back, out.value.still) == (((0, 2),), ((3, 1),))
        device.export(0, writable=False).close()
        device.reclaim(out.value.still)
        assert fake.free_bytes() == free
        assert goes_in_and_out(device, 4 * CHUNK)


def test_memory_is_taken_back_beside_copies_that_run(fake: fakecuda.Fake) -> None:
    source = HostBytes(2 * CHUNK, noise(2 * CHUNK))
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device, ThreadPoolExecutor(1) as thread:
        device.lend(((2, 2),))
        fake.faults("cuMemcpyHtoDAsync hold async")
        copy = thread.submit(device.copy_in, ((0, 2),), source.address, source.nbytes)
        device.reclaim(((2, 2),))
        assert not copy.done()
        fake.faults()
        copy.result()


def test_an_error_leaves_lent_what_was_lent(fake: fakecuda.Fake) -> None:
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device:
        free = fake.free_bytes()
        device.lend(((0, 2), (3, 1)))
        export = "cuMemExportToShareableHandle"
        for step in ("cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", export):
            fake.faults(f"{step} 304 after=1 times=1")
            with pytest.raises(DeviceError, match=step):
                device.reclaim(((0, 2), (3, 1)))
            assert fake.free_bytes() == free + 3 * CHUNK
        device.reclaim(((0, 2), (3, 1)))
        assert fake.free_bytes() == free
        assert goes_in_and_out(device, 4 * CHUNK)


def test_lending_that_fails_half_way_can_be_undone(fake: fakecuda.Fake) -> None:
    with closing(CudaDevice(0, 3 * CHUNK, CHUNK)) as device:
        free = fake.free_bytes()
        fake.faults("cuMemUnmap 1 after=1 times=1")
        with pytest.raises(DeviceError, match="cuMemUnmap"):
            device.lend(((0, 3),))
        assert fake.free_bytes() == free + CHUNK
        device.reclaim(((0, 3),))
        assert fake.free_bytes() == free
        assert goes_in_and_out(device, 3 * CHUNK)


# --- use ---------------------------------------------------------------------------------


def test_use_tells_of_other_processes_and_of_no_note_without_a_reason(
    fake: fakecuda.Fake,
) -> None:
    with closing(CudaDevice(0, 4 * CHUNK, CHUNK)) as device:
        assert device.use() == (256 * MIB, 248 * MIB, (), (), 0, 0)
        with start_python("import sys; sys.stdin.read()") as other:  # noqa: SIM117
            with fake.occupied(5 * MIB, pid=other.pid):
                use = device.use()
        assert (use.free, [(p.pid, p.nbytes) for p in use.processes]) == (
            243 * MIB,
            [(other.pid, 5 * MIB)],
        )


def test_use_is_of_the_card_that_is_served_and_says_that_mig_is_on() -> None:
    with fakecuda.machine(devices=2, total=64 * MIB, mig=True) as machine:
        environment = {**machine.environment(), "CUDA_VISIBLE_DEVICES": "1"}
        with machine.occupied(7 * MIB, pid=1, gpu=1), machine.occupied(5 * MIB, pid=2, gpu=0):
            processes, *notes = output_of(PROGRAM, "use", env=environment).splitlines()
    assert processes == str((1, 7 * MIB))
    assert len(notes) == 1
    assert notes[0].startswith("MIG is on")


# --- faults ------------------------------------------------------------------------------


def test_a_worker_that_writes_to_what_it_may_only_read_harms_itself_alone(
    fake: fakecuda.Fake,
) -> None:
    with closing(CudaDevice(0, 2 * CHUNK, CHUNK)) as device:
        assert goes_in_and_out(device, 2 * CHUNK)
        with device.export(0, writable=False) as fd:
            arguments = backends.cuda({}).arguments("stray", device, fd.fileno(), 0, False)
            said = output_of(
                backends.PROGRAM, *arguments, fds=[fd.fileno()], env=fake.environment()
            )
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in said
        target = HostBytes(5)
        device.copy_out(((0, 1),), target.address, 5)
        assert bytes(target) == noise(2 * CHUNK)[:5]
        assert goes_in_and_out(device)


@pytest.mark.parametrize(
    "fault",
    [
        "cuMemcpyHtoDAsync 700 after=2 times=1 async",
        "cuMemcpyHtoDAsync 719 after=2 times=1 sticky",
        "cuEventSynchronize 702 after=2 times=1 sticky",
    ],
)
def test_a_lost_device_says_by_what_and_answers_everything_so(fault: str) -> None:
    with fakecuda.machine(total=64 * MIB) as machine:
        machine.faults(fault)
        said = output_of(PROGRAM, "lose_it", env=machine.environment()).splitlines()
        assert machine.allocations() == []
    # either thread may meet it first; from then on it is the same error
    code, calls = fault.split()[1], "cuMemcpyHtoDAsync|cuEventRecord|cuEventSynchronize"
    (error,) = {line.split(" ", 1)[1] for line in said[:-1]}
    assert re.fullmatch(rf"cuda:0 is lost: CUDA_ERROR_\w+ \({code}\) in ({calls})", error), said
    assert len(said) == 7
    closed, threads = map(int, said[-1].split())
    assert closed >= 15, "the chunks' descriptors are closed"
    assert threads == 1


def test_a_start_that_loses_the_device_leaves_no_descriptor() -> None:
    with fakecuda.machine(total=64 * MIB) as machine:
        said, left = output_of(
            PROGRAM, "lose_it_at_the_start", env=machine.environment()
        ).splitlines()
    assert "CUDA_ERROR_LAUNCH_FAILED (719) in cuMemMap" in said
    assert int(left) <= 4, "handles and a context, which are the driver's and end with the process"
