"""The driver wrapper: errors name the missing part and the remedy, and a lost device stays lost.

Each case that spoils its process runs in a process of its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from swapd.device.base import DeviceError
from swapd.device.context import CudaError
from swapd.device.driver import Access, Driver
from swapd.shared.fds import OwnedFd
from tests import fakecuda
from tests.device import backends
from tests.processes import output_of
from tests.threads import started

CHUNK = 2 << 20
PROGRAM = Path(__file__).parent / "programs" / "driver.py"


@pytest.fixture
def driver(fake: fakecuda.Fake) -> Iterator[Driver]:
    with closing(Driver(0)) as driver:
        yield driver
    fake.faults()
    assert fake.allocations() == []


def said_by(case: str, *args: object, faults: Sequence[str] = (), **knobs: object) -> str:
    """The output of this case on a fake machine of its own, with these failures injected."""
    with fakecuda.machine(**knobs) as machine:
        machine.faults(*faults)
        said = output_of(PROGRAM, case, *args, env=machine.environment())
        assert machine.allocations() == []
    return said.strip()


# --- missing parts -----------------------------------------------------------------------


def test_without_the_bindings_it_says_what_to_install() -> None:
    said = said_by("without_bindings")
    assert said.startswith("DeviceError: the CUDA driver's Python bindings are missing")
    assert said.endswith("pip install 'swapd[cuda]', or use --device host")


@pytest.mark.skipif(backends.gpu_here(), reason="there is a driver here")
def test_without_a_driver_it_says_so_and_names_the_ways_out() -> None:
    said = output_of(PROGRAM, "refused_device")
    for words in ("no NVIDIA driver", "libcuda.so.1", "--gpus all", "--device host"):
        assert words in said


def test_without_a_gpu_it_says_where_to_look() -> None:
    said = said_by("refused_card", 0, devices=0)
    assert "CUDA_ERROR_NO_DEVICE (100) in cuInit" in said or "this process sees no GPU" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_a_driver_that_is_too_old_is_told_with_both_versions() -> None:
    said = said_by("refused_card", 0, version=11080)
    assert "it is for CUDA 11.8, and CUDA 12.0 (driver 525) or newer is needed" in said


def test_the_oldest_driver_that_will_do_does() -> None:
    assert said_by("opened", version=12000) == "opened"


def test_an_index_that_does_not_exist_is_answered_with_those_that_do() -> None:
    said = said_by("refused_card", 2, devices=2)
    assert "there is no cuda:2; this process sees cuda:0 (" in said
    assert ", cuda:1 (" in said


def test_a_gpu_is_found_by_its_uuid_whatever_its_index() -> None:
    said = said_by("by_uuid", devices=2)
    assert said.splitlines() == [
        "1 True GPU-",
        "DeviceError: this process does not see the GPU GPU-none; is CUDA_VISIBLE_DEVICES set?",
    ]


def test_a_call_that_the_driver_does_not_have_is_told_as_an_old_driver(driver: Driver) -> None:
    def cu_from_the_future() -> None:
        raise RuntimeError("function cuFromTheFuture is not found")

    with pytest.raises(DeviceError, match="cuFromTheFuture"):
        driver.call(cu_from_the_future)


# --- errors ------------------------------------------------------------------------------


def test_an_error_that_the_bindings_do_not_know_is_told_by_its_number(driver: Driver) -> None:
    def cuFromTheFuture() -> tuple[int]:
        return (54321,)

    with pytest.raises(CudaError, match=r"\(54321\) in cuFromTheFuture"):
        driver.call(cuFromTheFuture)


def test_an_error_is_named_with_its_number_and_its_call(driver: Driver) -> None:
    with driver.current():
        with pytest.raises(CudaError, match=r"^CUDA_ERROR_INVALID_VALUE \(1\) in cuMemCreate$"):
            driver.create(12345)
        with pytest.raises(CudaError) as full:
            driver.create(1 << 40)
    assert full.value.out_of_memory
    assert not driver.lost


def test_an_error_with_a_known_way_out_names_it(driver: Driver, fake: fakecuda.Fake) -> None:
    fake.faults("cuDevicePrimaryCtxRetain 46")
    with pytest.raises(DeviceError, match=r"DEVICE_UNAVAILABLE.*compute mode"):
        Driver(0)


STICKY = [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810]


@pytest.mark.parametrize("code", STICKY)
def test_after_an_error_that_the_context_does_not_survive_no_call_is_made(code: int) -> None:
    *said, last = said_by("spoiled", code).splitlines()
    lost, name = last.split()
    assert lost == "True"
    assert said == [f"DeviceLost: cuda:0 is lost: {name} ({code}) in cuSpoiled"] * 4


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (["cuMemHostRegister 999"], "CudaError: CUDA_ERROR_UNKNOWN"),
        (["cuMemHostRegister 999", "cuStreamQuery 999"], "DeviceLost: cuda:0 is lost: CUDA_ERROR"),
    ],
    ids=["well", "lost"],
)
def test_after_an_unknown_error_the_context_is_asked(faults: list[str], error: str) -> None:
    assert said_by("pin", faults=faults).startswith(error)


# --- contexts ----------------------------------------------------------------------------


def test_a_thread_has_its_own_context_again_afterwards(driver: Driver) -> None:
    api = driver.api
    assert int(driver.call(api.cuCtxGetCurrent)) == 0
    with driver.current():
        first = int(driver.call(api.cuCtxGetCurrent))
        with driver.current():
            assert int(driver.call(api.cuCtxGetCurrent)) == first
        assert int(driver.call(api.cuCtxGetCurrent)) == first != 0
    assert int(driver.call(api.cuCtxGetCurrent)) == 0


def test_calls_work_in_any_thread(driver: Driver) -> None:
    seen = []

    def look() -> None:
        with driver.current():
            seen.append(driver.memory())

    started(look).join()
    with driver.current():
        assert seen == [driver.memory()]


def test_a_forked_child_is_told_not_to(driver: Driver) -> None:
    said = said_by("fork")
    assert said == "DeviceError: CUDA does not survive a fork: start processes with spawn"


def test_close_may_be_called_again(driver: Driver) -> None:
    driver.close()
    driver.close()


# --- memory ------------------------------------------------------------------------------


def test_memory_is_shared_by_descriptor_and_freed_with_its_last_holder(
    driver: Driver, fake: fakecuda.Fake
) -> None:
    with driver.current():
        handle = driver.create(CHUNK)
        fd = driver.export(handle)
        assert not os.get_inheritable(fd.fileno())
        other = driver.adopt(fd.fileno())
        address = driver.reserve(CHUNK)
        driver.map(address, CHUNK, other)
        driver.set_access(address, CHUNK, Access.READ)
        for held in (handle, other):
            driver.release(held)
            assert fake.used_bytes() == CHUNK
        fd.close()
        assert fake.used_bytes() == CHUNK
        driver.unmap(address, CHUNK)
        assert fake.used_bytes() == 0
        driver.free(address, CHUNK)


def test_a_descriptor_of_something_else_is_no_memory(driver: Driver) -> None:
    with OwnedFd(os.memfd_create("else")) as fd, driver.current(), pytest.raises(CudaError):
        driver.adopt(fd.fileno())


def test_an_attribute_that_nobody_knows_is_0(driver: Driver, fake: fakecuda.Fake) -> None:
    assert driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") == 1
    assert driver.attribute("WHAT_WILL_BE_ASKED_IN_2030") == 0
    fake.faults("cuDeviceGetAttribute 1")
    assert driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") == 0


def test_the_bindings_are_imported_when_a_gpu_is_opened_and_not_before() -> None:
    program = "import sys, swapd.device.driver, swapd.device.cuda; print(*sys.modules)"
    loaded = output_of(program, anew=True).split()
    assert not {name for name in loaded if name.startswith(("cuda", "pynvml"))}


def test_a_device_that_is_lost_already_is_told_as_such() -> None:
    said = said_by("refused_card", 0, faults=["cuDevicePrimaryCtxRetain 214"])
    assert said.startswith("DeviceLost: cuda:0 is lost: CUDA_ERROR_ECC_UNCORRECTABLE (214)")
