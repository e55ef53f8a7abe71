"""Copies that run in parallel or take turns. `python engines.py CASE` runs the function CASE."""

import ctypes
import os
import sys
from typing import Any

from tests.fakecuda.calls import UNIT, Host, call, code_of, event, memory, start, stream


def say(what: object) -> None:
    print(what, flush=True)  # noqa: T201


def record(s: Any) -> Any:
    made = event()
    call("cuEventRecord", made, s)
    return made


class LongCopy:
    """A copy into the card that has begun."""

    def __init__(self) -> None:
        self.address, self.source = memory(8 * UNIT), Host(8 * UNIT).pin()
        self.source[:1], self.source[8 * UNIT - 1 :] = b"x", b"z"
        call("cuMemcpyHtoDAsync", self.address, self.source.address, 8 * UNIT, stream())
        while ctypes.string_at(self.address, 1) != b"x":
            pass

    def arrived(self) -> bool:
        return ctypes.string_at(self.address + 8 * UNIT - 1, 1) == b"z"


def other_direction() -> None:
    opposite, copy = stream(), LongCopy()
    back = Host(4096).pin()
    call("cuMemcpyDtoHAsync", back.address, copy.address, 4096, opposite)
    call("cuEventSynchronize", record(opposite))
    say(copy.arrived())


def same_direction() -> None:
    same, copy = stream(), LongCopy()
    call("cuMemcpyHtoDAsync", copy.address + 4096, copy.source.address, 1, same)
    call("cuEventSynchronize", record(same))
    say(copy.arrived())


def own_rates() -> None:
    address, host, s = memory(8 * UNIT), Host(8 * UNIT).pin(), stream()
    call("cuMemcpyDtoHAsync", host.address, address, UNIT, s)
    out = record(s)
    call("cuMemcpyHtoD", address, host.address, 8 * UNIT)
    say(code_of("cuEventQuery", out))
    os._exit(0)


def long() -> None:
    copy = LongCopy()
    say("copying")
    sys.stdin.readline()
    say(copy.arrived())
    os._exit(0)


def short() -> None:
    address, source = memory(), Host(4096).pin()
    call("cuMemcpyHtoD", address, source.address, 1)
    say(call("cuMemGetInfo")[0])


if __name__ == "__main__":
    start()
    globals()[sys.argv[1]]()
