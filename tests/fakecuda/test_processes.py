"""The fake driver between processes: sharing, deaths, faults that spoil one and not the other."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests import fakecuda
from tests.fakecuda import calls
from tests.fakecuda.calls import UNIT, call, create, export
from tests.fakecuda.programs import faults
from tests.fakecuda.test_fakecuda import fake
from tests.processes import output_of, run_python, start_python

__all__ = ["fake"]  # a fixture
PROGRAMS = Path(__file__).parent / "programs"
PRELUDE = """
import ctypes, os, socket, sys
from tests.fakecuda.calls import *
def say(*what): print(*what, flush=True)
"""


def whole(program: str | Path) -> str | Path:
    return program if isinstance(program, Path) else PRELUDE + dedent(program)


def start(fake: fakecuda.Fake, program: str | Path, *args: object, fds: Sequence[int] = ()) -> Any:
    return start_python(whole(program), *args, fds=fds, env=fake.environment())


def output(fake: fakecuda.Fake, program: str | Path, *args: object, **knobs: object) -> str:
    return output_of(whole(program), *args, env=fake.environment(**knobs)).strip()


def kill(child: Any) -> None:
    child.kill()
    assert child.wait() == -signal.SIGKILL


# ---- deaths


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_a_dead_process_held_is_free(fake: fakecuda.Fake, how: str) -> None:
    program = """
        start()
        a, b, c = create(), mapped(create()), export(create())
        say("ready")
        sys.stdin.read()
    """
    with start(fake, program) as child:
        assert child.stdout.readline() == "ready\n"
        assert fake.held_bytes() == 3 * UNIT
        if how == "killed":
            kill(child)
        else:
            child.stdin.close()
            assert child.wait() == 0
    assert fake.held_bytes() == 0
    assert [each for each in fake.allocations() if each.pid == child.pid] == []


def test_the_machine_of_a_killed_test_run_is_removed_by_the_next() -> None:
    program = """
        import sys
        from tests import fakecuda
        fakecuda.built = lambda: None  # its libraries are not needed
        with fakecuda.machine() as fake:
            print(fake.memory, flush=True)
            sys.stdin.read()
    """
    with start_python(program) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        with fakecuda.machine():
            assert left.exists(), "in use"
        kill(child)
    assert left.exists()
    with fakecuda.machine():
        assert not left.exists()


# ---- initialisation


def test_nothing_works_before_it_is_initialised(fake: fakecuda.Fake) -> None:
    program = """
        say(code_of("cuDeviceGetCount"), code_of("cuMemCreate", UNIT, properties(), 0))
        say(code_of("cuMemGetInfo"), code_of("cuDriverGetVersion"))
    """
    assert output(fake, program) == "3 3\n3 0"


def test_a_forked_child_cannot_use_its_parents_driver(fake: fakecuda.Fake) -> None:
    program = """
        start()
        address = memory()
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0
            say(code_of("cuMemGetInfo"))
        else:
            say(code_of("cuInit", 0), code_of("cuMemGetInfo"), code_of("cuMemRelease", 1))
            os._exit(0)
    """
    assert output(fake, program) == "3 3 3\n0"


def test_a_forked_child_does_not_have_the_mappings(fake: fakecuda.Fake) -> None:
    program = """
        start()
        address = memory()
        if pid := os.fork():
            say(os.WTERMSIG(os.waitpid(pid, 0)[1]))
        else:
            ctypes.string_at(address, 1)
            os._exit(0)
    """
    assert output(fake, program) == str(int(signal.SIGSEGV))


def test_memory_of_a_card_that_is_not_visible_cannot_be_imported(fake: fakecuda.Fake) -> None:
    handle = create()
    fd = export(handle)
    program = "start(); say(code_of('cuMemImportFromShareableHandle', int(sys.argv[1]), FD))"
    env = {**fake.environment(), "CUDA_VISIBLE_DEVICES": "1"}
    assert output_of(PRELUDE + program, fd, fds=[fd], env=env) == f"{calls.INVALID_DEVICE}\n"
    os.close(fd)
    call("cuMemRelease", handle)


# ---- faults of the device


@pytest.mark.parametrize("what", [case.__name__ for case in faults.CASES])
def test_a_fault_spoils_the_process_and_ends_every_wait(fake: fakecuda.Fake, what: str) -> None:
    said = output(fake, PROGRAMS / "faults.py", what, read_only_pins=True)
    assert said == str({calls.ILLEGAL_ADDRESS})
    call("cuCtxSynchronize")  # no other process is affected


def test_a_copy_is_caught_when_its_memory_goes_in_the_middle() -> None:
    with fakecuda.machine(gbps=0.01) as fake:
        assert output(fake, PROGRAMS / "faults.py", "unmap_in_the_middle") == str(
            calls.ILLEGAL_ADDRESS
        )


def test_nothing_runs_after_a_fault(fake: fakecuda.Fake) -> None:
    said = output(fake, PROGRAMS / "faults.py", "enqueue_more")
    assert said == f"{calls.ILLEGAL_ADDRESS} [] {bytes(1)!r}"


@pytest.mark.parametrize(
    "access",
    [
        "ctypes.string_at(memory(flags=NONE), 1)",
        "ctypes.memset(memory(flags=READ), 1, 1)",
        "ctypes.string_at(reserve(), 1)",
        "address = memory(); call('cuMemUnmap', address, UNIT); ctypes.string_at(address, 1)",
    ],
)
def test_a_stray_access_by_the_processor_is_a_crash(fake: fakecuda.Fake, access: str) -> None:
    done = run_python(f"{PRELUDE}start(); {access}", env=fake.environment())
    assert done.returncode == -signal.SIGSEGV


# ---- knobs


def test_a_card_may_refuse_to_unmap_more_than_one(fake: fakecuda.Fake) -> None:
    program = """
        start()
        address = reserve(2 * UNIT)
        for i in range(2): call("cuMemMap", address + i * UNIT, UNIT, 0, create(), 0)
        say(code_of("cuMemUnmap", address, 2 * UNIT), code_of("cuMemUnmap", address, UNIT))
    """
    assert output(fake, program, unmap_one=True) == "1 0"


def test_a_card_may_not_take_memory_that_is_read_only(fake: fakecuda.Fake) -> None:
    program = """
        start()
        attribute = driver.CUdevice_attribute
        name = attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        host = Host(4096, writable=False)
        say(call("cuDeviceGetAttribute", name, 0))
        say(*(code_of("cuMemHostRegister", host.address, 4096, flags) for flags in (0, 1, 2, 8)))
        if code_of("cuMemHostUnregister", host.address) == 0:
            host.pin(8 | 1)
            call("cuMemcpyHtoD", memory(), host.address, 16)
            say("copied")
    """
    assert output(fake, program) == "0\n1 1 1 801"
    assert output(fake, program, read_only_pins=True) == "1\n1 1 1 0\ncopied"
