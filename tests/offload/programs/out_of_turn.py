"""Touches a block out of its turn: `python out_of_turn.py FOLDER` ends in a fault."""

import sys

import swapd_client
from tests.offload.test_stream import family


def main(folder: str) -> None:
    model = family(swapd_client.connect(folder), 4)
    model.stream.enter()
    model.run(0)
    print("so far", flush=True)  # noqa: T201
    model.use(0)


if __name__ == "__main__":
    main(sys.argv[1])
