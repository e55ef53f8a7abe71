"""Kills the process of a daemon at some line of the code that parks host copies."""

import os
import signal
import sys
from types import FrameType
from typing import Any

from swapd.daemon import parked_copies, parking


def at_line(number: int) -> None:
    """The line that it runs as the `number`-th is its last."""
    left = number

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    files = (parked_copies.__file__, parking.__file__)
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in files else None)
