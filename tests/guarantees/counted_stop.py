"""`python -m tests.guarantees.counted_stop serve`: a daemon that counts the steps of its own end.

Its last line on stderr is the number of calls that its first thread made from the goodbye on.
"""

import os
import sys
from typing import NoReturn

from swapd.cli import main
from swapd.daemon.sessions import Sessions

_close = Sessions.close
_exit = os._exit
_calls = 0


def count(*_: object) -> None:
    global _calls
    _calls += 1


def close(sessions: Sessions) -> None:
    sys.setprofile(count)
    _close(sessions)


def end(status: int) -> NoReturn:
    sys.setprofile(None)
    os.write(2, b"%d\n" % _calls)
    _exit(status)


if __name__ == "__main__":
    Sessions.close = close  # type: ignore[method-assign, assignment]
    os._exit = end
    main()
