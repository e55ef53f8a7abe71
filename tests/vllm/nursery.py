"""`python -m tests.vllm.nursery FD` imports vLLM once, then forks a process for each engine.

Modules named after FD are imported too. The import takes longer than the rest of a tiny engine's
start. A child has an environment, a session and descriptors of its own; no thread and no
computation starts before the fork.

It says on the socket FD when it is ready. A request is a packet: the child's variables in JSON,
with three descriptors (commands, answers, log). The answer is the child's pid. The nursery ends
when the other side closes the socket.
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module

from tests.vllm import engine

PACKET_MAX = 1 << 16


def main() -> None:
    engine.load()
    for name in sys.argv[2:]:
        import_module(name)
    assert threading.active_count() == 1, "threads do not survive a fork"
    gc.freeze()  # shared with all children, for good
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
    with socket.socket(fileno=int(sys.argv[1])) as door:
        door.send(b"ready")
        while True:
            said, fds, _, _ = socket.recv_fds(door, PACKET_MAX, 3)
            if not said:
                return
            child = os.fork()
            if child == 0:
                door.close()
                _live(json.loads(said), *fds)
            for fd in fds:
                os.close(fd)
            door.send(str(child).encode())


def _live(variables: dict[str, str], commands: int, answers: int, log: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()  # noqa: TID251
    os.environ.update(variables)  # noqa: TID251
    for number, fd in enumerate((commands, answers, log)):
        os.dup2(fd, number)
        os.close(fd)
    engine.main()


if __name__ == "__main__":
    main()
