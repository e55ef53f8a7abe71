"""Begins an update and waits to be killed in its middle: `python half_updated.py FOLDER`."""

import sys

import swapd_client
from swapd.shared import protocol


def main(folder: str) -> None:
    client = swapd_client.connect(folder)
    client.register("raw", {"a": bytes(1 << 20)})
    request = client.session.next_id()
    client.leasing.call(protocol.Update(request, "raw"))
    client.session.masters.take(request)
    print("begun", flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
