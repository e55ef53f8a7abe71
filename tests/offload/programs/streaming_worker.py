"""A process that streams a family of blocks: `python streaming_worker.py FOLDER NAME CHUNKS FIRST`.

It reports that it is ready. After a line on stdin it works and prints its leases; after another one
it ends.
"""

import sys

import swapd_client
from tests.offload.test_stream import family


def main(folder: str, name: str, chunks: str, first: str) -> None:
    with swapd_client.connect(folder) as client:
        model = family(client, 6, name=name, chunks=int(chunks), first=int(first))
        print("ready", flush=True)  # noqa: T201
        sys.stdin.readline()
        for _ in range(5):
            model.forward()
        print(model.held(), flush=True)  # noqa: T201
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
