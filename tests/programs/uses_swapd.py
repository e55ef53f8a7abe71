"""A command that `swapd run` runs: two components take turns on the daemon that it gets."""

import signal
import sys

import swapd_client

MIB = 1 << 20


def main(then: str) -> None:
    with swapd_client.connect(label="worker") as client:
        for name in ("thinker", "talker"):
            client.register(name, {"w": name.encode().ljust(12 * MIB)})
        for name in ("thinker", "talker", "thinker"):
            with client.acquire(name):
                pass
        print("used", flush=True)  # noqa: T201
        if then == "wait":
            number = signal.sigwait([signal.SIGTERM, signal.SIGINT])
            print(signal.Signals(number).name, flush=True)  # noqa: T201
            sys.exit(7)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    main(sys.argv[1])
