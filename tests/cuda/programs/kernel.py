"""A kernel that outlives its process: writes to chunks again and again.

`python kernel.py FD ...`: descriptors of the chunks' memory, which this process keeps in use.
"""

import os
import sys
import time

BYTES = b"\xee" * (1 << 20)
#: It ends itself after so many seconds at the latest.
LASTS_S = 100


def main(fds: list[int]) -> None:
    until = time.monotonic() + LASTS_S
    while time.monotonic() < until:
        for fd in fds:
            for at in range(0, os.fstat(fd).st_size, len(BYTES)):
                os.pwrite(fd, BYTES, at)


if __name__ == "__main__":
    main([int(fd) for fd in sys.argv[1:]])
