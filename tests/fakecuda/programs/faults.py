"""Work on the fake GPU that faults. `python faults.py CASE` runs the function CASE.

For a case of `CASES` it prints the codes of all later calls, for others their result.
"""

import ctypes
import os
import sys
from typing import Any

from cuda.bindings import driver

from tests.fakecuda.calls import (
    NONE,
    READ,
    UNIT,
    WRITE,
    Gate,
    Host,
    access,
    call,
    code_of,
    create,
    event,
    memory,
    properties,
    reserve,
    start,
    stream,
    unmapped,
)

#: Memory that the GPU uses until the process ends.
kept: list[Any] = []


def host(flags: int = 0) -> Host:
    kept.append(made := Host(4096).pin(flags))
    return made


def gate(s: Any) -> Gate:
    kept.append(made := Gate(s))
    return made


def fill(address: int, s: Any) -> None:
    call("cuMemsetD8Async", address, 1, 16, s)


def into_memory_that_is_not_mapped(s: Any) -> None:
    fill(reserve(), s)


def into_memory_without_access(s: Any) -> None:
    fill(memory(flags=NONE), s)


def into_memory_that_is_read_only(s: Any) -> None:
    fill(memory(flags=READ), s)


def over_the_end_of_a_mapping(s: Any) -> None:
    address = reserve(2 * UNIT)
    call("cuMemMap", address, UNIT, 0, create(), 0)
    access(address, UNIT, WRITE)
    fill(address + UNIT - 8, s)


def out_of_memory_without_access(s: Any) -> None:
    call("cuMemcpyDtoHAsync", host().address, memory(flags=NONE), 16, s)


def unmapped_before_the_copy_runs(s: Any) -> None:
    address, held = memory(), gate(s)
    fill(address, s)
    unmapped(address)
    held.open()


def revoked_before_the_copy_runs(s: Any) -> None:
    address, held = memory(), gate(s)
    fill(address, s)
    access(address, UNIT, NONE)
    held.open()


def from_memory_that_was_unregistered_meanwhile(s: Any) -> None:
    source, address, held = host(), memory(), gate(s)
    call("cuMemcpyHtoDAsync", address, source.address, 16, s)
    source.unpin()
    held.open()


def from_registered_memory_that_is_gone(s: Any) -> None:
    source, address, held = host(), memory(), gate(s)
    call("cuMemcpyHtoDAsync", address, source.address, 16, s)
    source.close()
    held.open()


def into_memory_that_was_registered_for_reading(s: Any) -> None:
    call("cuMemcpyDtoHAsync", host(8).address, memory(), 16, s)


def a_flag_in_memory_that_is_read_only(s: Any) -> None:
    call("cuStreamWriteValue64", s, memory(flags=READ), 1, 0)


CASES = (
    into_memory_that_is_not_mapped,
    into_memory_without_access,
    into_memory_that_is_read_only,
    over_the_end_of_a_mapping,
    out_of_memory_without_access,
    unmapped_before_the_copy_runs,
    revoked_before_the_copy_runs,
    from_memory_that_was_unregistered_meanwhile,
    from_registered_memory_that_is_gone,
    into_memory_that_was_registered_for_reading,
    a_flag_in_memory_that_is_read_only,
)


def codes_after(case: Any) -> set[int]:
    """The codes of all calls after the fault, while another stream is held back without end."""
    s, other, recorded = stream(), stream(), event()
    gate(other)
    call("cuEventRecord", recorded, other)
    case(s)
    waits = [code_of("cuStreamSynchronize", s), code_of("cuEventSynchronize", recorded)]
    later = [
        code_of("cuMemGetInfo"),
        code_of("cuMemCreate", UNIT, properties(), 0),
        code_of("cuMemUnmap", 0, UNIT),
        code_of("cuStreamQuery", s),
        code_of("cuEventQuery", recorded),
        code_of("cuMemHostUnregister", 0),
        code_of("cuDevicePrimaryCtxRetain", 0),
    ]
    return set(waits + later)


def unmap_in_the_middle() -> int:
    """The code of a copy whose memory is unmapped meanwhile."""
    address, source, s = memory(), Host(UNIT).pin(), stream()
    source[:1] = b"x"
    call("cuMemcpyHtoDAsync", address, source.address, UNIT, s)
    while ctypes.string_at(address, 1) != b"x":
        pass
    call("cuMemUnmap", address, UNIT)
    return code_of("cuStreamSynchronize", s)


def enqueue_more() -> str:
    """The code, and the calls and writes behind the fault."""
    seen: list[object] = []
    address, s = memory(), stream()
    held = Gate(s)
    fill(reserve(), s)
    fill(address, s)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    pointer = driver.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
    call("cuLaunchHostFunc", s, pointer, 0)
    held.open()
    return f"{code_of('cuCtxSynchronize')} {seen} {ctypes.string_at(address, 1)!r}"


def main(name: str) -> None:
    start()
    case = globals()[name]
    print(codes_after(case) if case in CASES else case(), flush=True)  # noqa: T201
    os._exit(0)  # Python would free `kept`, while a stream's thread may still look at a gate


if __name__ == "__main__":
    main(sys.argv[1])
