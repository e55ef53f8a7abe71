"""An interrupt at each place where Python lets one in: one run of a call for each place.

Python runs a signal handler only at the start of a function, after a call of C code, and when a
loop starts over. A trace function that raises would do so anywhere, also where no signal ever
arrives: between the last line of a `with` block and its end. So the trace function here is C code
that makes the signal arrive, and the interpreter runs the handler at the next such place.
"""

import contextlib
import ctypes
import dis
import gc
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import swapd_client

T = TypeVar("T")

_CLIENT = str(Path(swapd_client.__file__).parent)
#: The client's code, and that of its `with` blocks.
_TRACED = (_CLIENT, contextlib.__file__)
_INTERRUPTED = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


class _Signal:
    """The first argument of a trace function, the frame, sends a signal."""

    from_param = partial(
        ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.py_object)(
            ("PyErr_SetInterruptEx", ctypes.pythonapi)
        ),
        signal.SIGINT,
    )


class _Untraced:
    """The last argument, None, ends the tracing: a traced start of a function has no handlers."""

    from_param = sys.settrace


#: A trace function without Python code, which would be interrupted itself.
_ARGUMENTS: list[Any] = [_Signal, ctypes.py_object, _Untraced]
_arrives = ctypes.PYFUNCTYPE(None, *_ARGUMENTS)(("Py_IsInitialized", ctypes.pythonapi))


class Place(NamedTuple):
    """An instruction of the client, and which time of all that it runs."""

    code: CodeType
    offset: int
    time: int

    def __str__(self) -> str:
        lines = [line for start, end, line in self.code.co_lines() if start <= self.offset < end]
        where = self.code.co_filename.removeprefix(_CLIENT)
        return f"{where}:{lines[0]} {self.code.co_name}, time {self.time}"


class _Tracer:
    """Sees each instruction of the client that the calling thread runs.

    `only`: those of this code alone, which takes a fraction of the time.
    """

    def __init__(
        self, sees: "Callable[[FrameType, Place], object]", only: CodeType | None = None
    ) -> None:
        self._sees = sees
        self._only = only
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code != self._only if self._only else not code.co_filename.startswith(_TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            at = code, frame.f_lasti
            self._times[at] += 1
            self._sees(frame, Place(*at, self._times[at]))
        return frame.f_trace or self


def places(call: Callable[[], object], most: int, seed: int = 1) -> list[Place]:
    """The instructions before those at which an interrupt arrives; each place at least once if
    there is room for that."""
    opcodes: dict[CodeType, dict[int, str]] = {}
    last: dict[FrameType, Place] = {}
    found: dict[Place, None] = {}

    def sees(frame: FrameType, place: Place) -> None:
        before, last[frame] = last.get(frame), place
        if before is None:
            around = frame.f_back and before_of.get(frame.f_back)
            if around:
                found[around] = None  # whatever it did, it called this function
            return
        before_of[frame] = before
        code = frame.f_code
        if code not in opcodes:
            opcodes[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
        name = opcodes[code].get(place.offset, "")
        if name in _INTERRUPTED or (name == "RETURN_VALUE" and code.co_name == "__init__"):
            found[before] = None

    before_of: dict[FrameType, Place] = {}
    sys.settrace(_Tracer(sees))
    try:
        call()
    finally:
        sys.settrace(None)
    by_code: dict[tuple[CodeType, int], list[Place]] = {}
    for place in found:
        by_code.setdefault(place[:2], []).append(place)
    chance = random.Random(seed)
    for those in by_code.values():
        chance.shuffle(those)
    once = [those.pop() for those in by_code.values()]
    again = [place for those in by_code.values() for place in those]
    chance.shuffle(once)
    chance.shuffle(again)
    return (once + again)[:most]


def interrupt(call: Callable[[], T], place: Place) -> T | None:
    """Call, and interrupt it after this place. Returns None if it was.

    The exception is kept, as a notebook keeps it, until `forget`: so are all frames that it passed,
    and what they refer to.
    """

    def sees(frame: FrameType, now: Place) -> None:
        if now == place:
            frame.f_trace = _arrives

    sys.settrace(_Tracer(sees, place.code))
    try:
        return call()
    except (KeyboardInterrupt, TypeError) as exc:
        # in place of one in the `__await__` of an `__anext__`, CPython raises a TypeError from it
        if isinstance(exc, TypeError) and not isinstance(exc.__cause__, KeyboardInterrupt):
            raise
        sys.last_value = exc
        return None
    finally:
        sys.settrace(None)


def forget() -> None:
    """Keep the last exception no longer."""
    sys.last_value = None


@contextmanager
def interrupts() -> Iterator[None]:
    """A `with` block in which no garbage is collected: an exception in a finalizer is lost."""
    before, lost = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    sys.unraisablehook = lambda one: None
    gc.disable()
    try:
        yield
    finally:
        forget()
        gc.enable()
        gc.collect()  # such as a file that was open when an interrupt came
        sys.unraisablehook = lost
        signal.signal(signal.SIGINT, before)
