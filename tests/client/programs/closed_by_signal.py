"""Waits for a component until a signal closes its client: `python closed_by_signal.py FOLDER`."""

import signal
import sys

import swapd_client


def main(folder: str) -> None:
    client = swapd_client.connect(folder, label="signalled")
    signal.signal(signal.SIGTERM, lambda *_: client.close())
    try:
        client.acquire("never", await_registration=True)
    except swapd_client.ClientClosed:
        print("told")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
