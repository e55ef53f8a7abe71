"""The fake driver between processes: sharing, deaths, faults that spoil one and not the other."""

import ctypes
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests import fakecuda
from tests.fakecuda import calls
from tests.fakecuda.calls import UNIT, call, code_of, create, export, mapped, unmapped
from tests.fakecuda.programs import faults
from tests.processes import output_of, run_python, start_python

PROGRAMS = Path(__file__).parent / "programs"
PRELUDE = """
import ctypes, os, socket, sys
from tests.fakecuda.calls import *
def say(*what): print(*what, flush=True)
"""


@pytest.fixture
def fake() -> Iterator[fakecuda.Fake]:
    """The machine of this process; afterwards nothing may be left, not even by a killed process."""
    fake = fakecuda.loaded()
    calls.start()
    assert fake.held_bytes() == 0
    yield fake
    assert fake.held_bytes() == 0


def whole(program: str | Path) -> str | Path:
    return program if isinstance(program, Path) else PRELUDE + dedent(program)


def start(fake: fakecuda.Fake, program: str | Path, *args: object, fds: Sequence[int] = ()) -> Any:
    return start_python(whole(program), *args, fds=fds, env=fake.environment())


def output(fake: fakecuda.Fake, program: str | Path, *args: object, **knobs: object) -> str:
    return output_of(whole(program), *args, env=fake.environment(**knobs)).strip()


def kill(child: Any) -> None:
    child.kill()
    assert child.wait() == -signal.SIGKILL


# ---- sharing


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


def test_new_memory_may_use_what_a_killed_process_held(fake: fakecuda.Fake) -> None:
    program = "start(); held = create(256 << 20); say('ready'); sys.stdin.read()"
    with start(fake, program) as child:
        assert child.stdout.readline() == "ready\n"
        assert code_of("cuMemCreate", UNIT, calls.properties(), 0) == calls.OUT_OF_MEMORY
        kill(child)
    call("cuMemRelease", create(256 << 20))


def test_memory_outlives_the_process_that_made_it(fake: fakecuda.Fake) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = """
        start()
        handle = create()
        address = mapped(handle)
        call("cuMemcpyHtoD", address, b"legacy", 6)
        fd = export(handle)
        socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [fd])
        sys.stdin.read()
    """
    with here, there, start(fake, program, there.fileno(), fds=[there.fileno()]) as child:
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
        handle = calls.import_(fds[0])
        os.close(fds[0])
        kill(child)
    assert fake.held_bytes() == UNIT
    address = mapped(handle)
    call("cuMemRelease", handle)
    assert ctypes.string_at(address, 6) == b"legacy"
    again = call("cuMemRetainAllocationHandle", address)
    assert code_of("cuMemExportToShareableHandle", again, calls.FD, 0) == calls.INVALID_VALUE
    call("cuMemRelease", again)
    unmapped(address)


def test_memory_outlives_a_process_that_imported_it(fake: fakecuda.Fake) -> None:
    handle = create()
    fd = export(handle)
    address = mapped(handle)
    program = """
        start()
        handle = import_(int(sys.argv[1]))
        call("cuMemcpyHtoD", mapped(handle), b"left", 4)
        say("ready")
        sys.stdin.read()
    """
    with start(fake, program, fd, fds=[fd]) as child:
        assert child.stdout.readline() == "ready\n"
        os.close(fd)
        kill(child)
    assert ctypes.string_at(address, 4) == b"left"
    call("cuMemRelease", handle)
    assert fake.held_bytes() == UNIT
    unmapped(address)


def test_a_copy_engine_is_free_again_when_its_user_is_killed(fake: fakecuda.Fake) -> None:
    with fakecuda.machine(gbps=0.001) as slow:
        program = """
            start()
            address, source = memory(), Host(UNIT).pin()
            source[:1] = b"x"
            call("cuMemcpyHtoDAsync", address, source.address, UNIT, stream())
            while ctypes.string_at(address, 1) != b"x": pass
            say("copying")
            sys.stdin.read()
        """
        with start(slow, program) as child:
            assert child.stdout.readline() == "copying\n"
            kill(child)
        copy = "start(); a = memory(); call('cuMemcpyHtoD', a, b'x', 1); say('done')"
        assert output(slow, copy) == "done"


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


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("GPU-fa4ec0da-0013-4000-8000-5a5a5a5a5a02", [2]),
        ("GPU-fa4ec0da-0013-4000-8000-5a5a5a5a5a01,0", [1, 0]),
        ("GPU-11111111", []),
    ],
)
def test_the_visible_devices_are_chosen_and_ordered(visible: str, expected: list[int]) -> None:
    program = """
        code = code_of("cuInit", 0)
        if code: say(code)
        else: say([call("cuDeviceGetUuid", i).bytes[-1] for i in range(call("cuDeviceGetCount"))])
    """
    with fakecuda.machine(devices=3) as fake:
        env = {**fake.environment(), "CUDA_VISIBLE_DEVICES": visible}
        found = output_of(PRELUDE + dedent(program), env=env).strip()
    assert found == (str(expected) if expected else str(calls.NO_DEVICE))


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


def test_registering_has_limits(fake: fakecuda.Fake) -> None:
    program = """
        start()
        large, small = Host(3 * MIB), [Host(MIB) for _ in range(3)]
        register = lambda host: code_of("cuMemHostRegister", host.address, host.nbytes, 0)
        say(register(large), *map(register, small))
        small[0].unpin()
        say(register(small[2]))
    """
    assert output(fake, program, pin_max=2 << 20, pin_total=2 << 20) == "1 0 0 2\n0"


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


def test_a_context_takes_memory_of_the_card() -> None:
    program = """
        start()
        say(call("cuMemGetInfo")[0] >> 20)
        call("cuDevicePrimaryCtxRelease", 0)
    """
    with fakecuda.machine(total=256 << 20, context=100 << 20) as fake:
        assert output(fake, program) == "156"
        assert fake.allocations() == []


def test_an_old_driver_says_so_and_lacks_later_calls() -> None:
    program = """
        call("cuInit", 0)
        say(call("cuDriverGetVersion"))
        try: driver.cuMemCreate(UNIT, properties(), 0)
        except RuntimeError as error: say(error)
    """
    with fakecuda.machine(version=10010) as fake:
        found = output(fake, program).splitlines()
    assert found[0] == "10010"
    assert "cuMemCreate" in found[1]


def test_a_machine_without_a_folder_says_so() -> None:
    env = fakecuda.environment(fakecuda.built(), dir="/nonexistent")
    done = run_python(PRELUDE + "say(code_of('cuInit', 0))", env=env)
    assert (done.returncode, done.stdout) == (0, "304\n")
    assert "FAKECUDA_DIR must name an existing folder" in done.stderr


# ---- copy engines

ENGINES = PROGRAMS / "engines.py"


def test_the_two_directions_run_side_by_side() -> None:
    with fakecuda.machine(gbps=0.02) as fake:
        assert output(fake, ENGINES, "other_direction") == "False"


def test_copies_in_one_direction_take_turns() -> None:
    with fakecuda.machine(gbps=0.1) as fake:
        assert output(fake, ENGINES, "same_direction") == "True"


def test_copies_of_two_processes_in_one_direction_take_turns(fake: fakecuda.Fake) -> None:
    with fakecuda.machine(gbps=0.02) as slow, start(slow, ENGINES, "long") as child:
        assert child.stdout.readline() == "copying\n"
        output(slow, ENGINES, "short")
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "True\n"
