"""Uses a component: `python few_threads.py FOLDER`. The parent has limited
the address space, and so the number of threads.
"""

import sys

import swapd_client


def main(folder: str) -> None:
    try:
        with swapd_client.connect(folder, label="few threads") as client:
            client.register("a", {"weights": bytearray(4096)})
            for _ in range(4):  # from the second on the lease is kept, if a thread can release it
                client.acquire("a").release()
            client.acquire("a", timeout=5).release()
    except swapd_client.LimitReached as exc:
        print(f"refused: {exc}")  # noqa: T201
    else:
        print("served")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
