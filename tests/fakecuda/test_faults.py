"""Failures that a test injects into running processes, and the trace of their calls."""

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests import fakecuda
from tests.fakecuda import calls
from tests.fakecuda.calls import UNIT, call, code_of, memory, unmapped
from tests.processes import output_of, start_python

PRELUDE = """
import ctypes, os, sys
from tests.fakecuda.calls import *
def say(*what): print(*what, flush=True)
start()
"""


@pytest.fixture
def fake() -> Iterator[fakecuda.Fake]:
    """The machine of this process, with no faults left behind."""
    fake = fakecuda.loaded()
    calls.start()
    yield fake
    fake.faults()
    assert fake.held_bytes() == 0


def sizes(count: int) -> list[int]:
    """The codes of `count` calls of one name, in order."""
    return [code_of("cuMemGetInfo") for _ in range(count)]


def test_a_call_fails_as_it_is_told(fake: fakecuda.Fake) -> None:
    fake.faults("cuMemGetInfo_v2 719")
    assert sizes(2) == [719, 719]
    fake.faults()
    assert sizes(1) == [0]


def test_calls_may_go_well_first_and_again_later(fake: fakecuda.Fake) -> None:
    fake.faults("cuMemGetInfo_v2 2 after=2 times=1")
    assert sizes(5) == [0, 0, 2, 0, 0]


def test_writing_the_rules_again_starts_their_counts_anew(fake: fakecuda.Fake) -> None:
    for _ in range(2):
        fake.faults("cuMemGetInfo_v2 2 times=1")
        assert sizes(2) == [2, 0]


def test_a_rule_may_be_for_one_process(fake: fakecuda.Fake) -> None:
    fake.faults(f"cuMemGetInfo_v2 2 pid={os.getpid()}")
    assert sizes(1) == [2]
    assert output_of(PRELUDE + "say(call('cuMemGetInfo')[1])", env=fake.environment())


def test_a_failure_that_was_only_injected_does_not_spoil_the_process(fake: fakecuda.Fake) -> None:
    stream, address = calls.stream(), memory()
    fake.faults("cuMemsetD8Async 700 times=1")
    assert code_of("cuMemsetD8Async", address, 1, 16, stream) == calls.ILLEGAL_ADDRESS
    call("cuMemsetD8Async", address, 1, 16, stream)
    call("cuStreamSynchronize", stream)
    call("cuStreamDestroy", stream)
    unmapped(address)


def test_a_sticky_failure_spoils_it(fake: fakecuda.Fake) -> None:
    fake.faults("cuEventCreate 719 sticky")
    program = "say(code_of('cuEventCreate', 0), code_of('cuMemGetInfo'))"
    assert output_of(PRELUDE + program, env=fake.environment()) == "719 719\n"


@pytest.mark.parametrize(
    "operation",
    [
        'call("cuMemcpyHtoDAsync", address, host.address, 8, s)',
        'call("cuMemcpyDtoHAsync", host.address, address, 8, s)',
        'call("cuMemcpyDtoDAsync", address, address + 64, 8, s)',
        'call("cuMemsetD8Async", address, 1, 8, s)',
        'call("cuStreamWriteValue64", s, address, 1, 0)',
        'call("cuStreamWaitValue64", s, address, 1, 0)',
        'call("cuEventRecord", event(), s)',
    ],
)
def test_an_operation_fails_when_it_runs(fake: fakecuda.Fake, operation: str) -> None:
    name = operation.partition('"')[2].partition('"')[0]
    fake.faults(f"{name} 719 async times=1")
    program = f"""
s, address, host = stream(), memory(), Host(4096).pin()
gate = Gate(s) if "Wait" not in {name!r} else None
{operation}
before = code_of("cuMemGetInfo")
if gate: gate.open(); say(before)
say(code_of("cuStreamSynchronize", s), code_of("cuMemGetInfo"))
"""
    found = output_of(PRELUDE + program, env=fake.environment()).splitlines()
    assert found[-1] == "719 719"
    assert found[:-1] in ([], ["0"]), "the call itself went well"


class Trace:
    """The calls of all processes of a machine, as they make them."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.fdopen(os.open(path, os.O_RDWR), encoding="utf-8")

    def until(self, *words: str) -> list[list[str]]:
        """Read up to the line with these words after pid and tid; returns all lines read."""
        lines: list[list[str]] = []
        while not lines or lines[-1][2:] != list(words):
            lines.append(self._file.readline().split())
        return lines

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Trace]:
    made = Trace(tmp_path / "trace")
    yield made
    made.close()


def child_of(fake: fakecuda.Fake, program: str, tmp_path: Path) -> Any:
    env = fake.environment(trace=tmp_path / "trace")
    return start_python(PRELUDE + dedent(program), env=env)


def test_the_trace_tells_who_called_what(fake: fakecuda.Fake, trace: Trace, tmp_path: Path) -> None:
    with child_of(fake, "memory(); in_thread(lambda: code_of('cuMemGetInfo'))", tmp_path) as child:
        lines = trace.until("cuMemGetInfo_v2")
    assert {line[0] for line in lines} == {str(child.pid)}
    assert [line[2] for line in lines if line[2].startswith("cuMem")] == [
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
        "cuMemGetInfo_v2",
    ]
    assert lines[0][1] != lines[-1][1], "another thread"


def test_a_call_is_held_until_its_rule_is_gone(
    fake: fakecuda.Fake, trace: Trace, tmp_path: Path
) -> None:
    fake.faults("cuMemCreate hold")
    with child_of(fake, "create(); say('made'); sys.stdin.read()", tmp_path) as child:
        trace.until("cuMemCreate", "held")
        assert fake.held_bytes() == 0
        fake.faults()
        assert child.stdout.readline() == "made\n"
        assert fake.held_bytes() == UNIT
        child.kill()


def test_an_operation_is_held_while_its_caller_goes_on(
    fake: fakecuda.Fake, trace: Trace, tmp_path: Path
) -> None:
    fake.faults("cuMemcpyHtoDAsync_v2 hold async after=1 times=1")
    program = """
        s, address, source = stream(), memory(), Host(4096).pin()
        copies = [event() for _ in range(2)]
        for made in copies:
            call("cuMemcpyHtoDAsync", address, source.address, 16, s)
            call("cuEventRecord", made, s)
        say(code_of("cuMemGetInfo"))
        for _ in sys.stdin: say(*(code_of("cuEventQuery", made) for made in copies))
    """

    def ask() -> str:
        child.stdin.write("?\n")
        child.stdin.flush()
        return str(child.stdout.readline())

    with child_of(fake, program, tmp_path) as child:
        assert child.stdout.readline() == "0\n"
        trace.until("cuMemcpyHtoDAsync_v2", "held")
        assert ask() == "0 600\n"
        fake.faults()
        while ask() != "0 0\n":
            pass
