"""A stage of `swapd run FILE`: it uses a component of its own, and then follows its argument."""

import os
import signal
import sys
from pathlib import Path

import swapd_client

MIB = 1 << 20


def main(name: str, then: str) -> None:
    with swapd_client.connect(label="worker") as client:
        client.register(name, {"w": name.encode().ljust(12 * MIB)})
        lease = client.acquire(name)
        print("used", os.getpid())  # noqa: T201 - not flushed: swapd run sees to that
        if then == "die once" and not (died := Path("died")).exists():
            died.touch()
            signal.raise_signal(signal.SIGKILL)
        lease.release()
        if then == "wait":
            number = signal.sigwait([signal.SIGTERM, signal.SIGINT])
            print(signal.Signals(number).name)  # noqa: T201
            sys.exit(7)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    main(*sys.argv[1:])
