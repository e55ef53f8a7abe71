"""Functions whose `try` statement covers all of them, and steps that are not left half done.

CPython may run a signal handler before the first instruction of a function, outside of its `try`
statement. `covered` extends the statement to that instruction. No handler runs between two
instructions that call nothing.
"""

from asyncio import CancelledError
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])
P = ParamSpec("P")

#: Numbers in an exception table are bytes of 6 bits, with MORE before a further byte, and FIRST in
#: the first byte of an entry.
_FIRST, _MORE, _BITS = 0x80, 0x40, 6


def covered(function: Function) -> Function:
    """Make the `try` statement at the function's beginning cover all of it."""
    code = function.__code__
    start, at = _number(code.co_exceptiontable, 0)
    size, at = _number(code.co_exceptiontable, at)
    first = bytes([_FIRST]) + _bytes_of(start + size) + code.co_exceptiontable[at:]
    function.__code__ = code.replace(co_exceptiontable=first)
    return function


def _number(table: bytes, at: int) -> tuple[int, int]:
    number = table[at] & (_MORE - 1)
    while table[at] & _MORE:
        at += 1
        number = number << _BITS | table[at] & (_MORE - 1)
    return number, at + 1


def _bytes_of(number: int) -> bytes:
    low, high = number & (_MORE - 1), number >> _BITS
    if not high:
        return bytes([low])
    return bytes([byte | _MORE for byte in _bytes_of(high)]) + bytes([low])


@covered
def to_its_end(step: Callable[[], object], tries: int = 3) -> None:
    """Call `step()`; after an interrupt, call it again before the interrupt goes on.

    The step must allow repetition.
    """
    try:
        step()
    except (Exception, CancelledError):
        raise
    except BaseException:
        if tries:
            with suppress(Exception):  # the interrupt is the one to report
                to_its_end(step, tries - 1)
        raise


class _CoveredBlock(AbstractContextManager[None]):
    def __init__(self, steps: Generator[None, None, None]) -> None:
        self._steps = steps

    @covered
    def __enter__(self) -> None:
        try:
            next(self._steps)
        except BaseException:
            to_its_end(self._steps.close)
            raise

    @covered
    def __exit__(self, *_: object) -> None:
        try:
            next(self._steps, None)
        except BaseException:
            to_its_end(self._steps.close)
            raise


def covered_block(
    function: Callable[P, Generator[None, None, None]],
) -> Callable[P, AbstractContextManager[None]]:
    """As `contextlib.contextmanager`, but an interrupt between the `yield` and the block ends both.

    There, contextlib leaves the generator to the collector, and a kept traceback keeps it alive:
    its `finally` never runs. The generator is not told whether the block raised.
    """

    @wraps(function)
    def block(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return _CoveredBlock(function(*args, **kwargs))

    return block
