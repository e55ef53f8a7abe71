"""A process uses the GPU that is visible to it.

`python visible_gpu.py CASE FOLDER` runs the function CASE with the daemon in FOLDER.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import swapd_client
from swapd_client import Client

DATA = b"x" * (1 << 20)


def use(folder: str) -> None:
    """Print the index of the card, and whether the component has an address on it."""
    with swapd_client.connect(folder) as client:
        part = client.register("mine", {"data": DATA})
        with client.acquire("mine"):
            print(client.session.processor.index, part.address > 0)  # noqa: T201


def use_without_bindings(folder: str) -> None:
    sys.modules["cuda.bindings.driver"] = None  # type: ignore[assignment]
    use(folder)


def fork(folder: str) -> None:
    importlib.import_module("cuda.bindings.driver")
    client = swapd_client.connect(folder)
    child = in_a_child(lambda: connect_in_a_child(folder))
    assert child == 7, "nothing of CUDA was touched, so a child can use it"
    client.register("mine", {"data": DATA})
    lease = client.acquire("mine")
    uses = (lease.release, lambda: client.acquire("mine"), lambda: client.unregister("mine"))
    assert in_a_child(lambda: refused_in_a_child(client, uses)) == 9
    lease.release()
    client.close()


def in_a_child(run: Callable[[], int]) -> int:
    """Fork, and end the child with the result of `run`. Returns its exit code."""
    pid = os.fork()
    if not pid:
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def connect_in_a_child(folder: str) -> int:
    with swapd_client.connect(folder) as mine:
        name = f"by {os.getpid()}"
        mine.register(name, {"data": DATA})
        with mine.acquire(name):
            os._exit(7)


def refused_in_a_child(client: Client, uses: tuple[Callable[[], Any], ...]) -> int:
    for each in uses:
        try:
            each()
        except swapd_client.ClientClosed:
            pass
        else:
            return 1
    client.close()
    return 9


def keep_the_context(folder: str) -> None:
    """The process works on the second card all the time."""
    driver = importlib.import_module("cuda.bindings.driver")
    driver.cuInit(0)
    other = driver.cuDevicePrimaryCtxRetain(1)[1]
    driver.cuCtxSetCurrent(other)

    def same() -> bool:
        return int(driver.cuCtxGetCurrent()[1]) == int(other)

    client = swapd_client.connect(folder)
    client.register("mine", {"data": DATA})
    assert same()
    for _ in range(3):
        with client.acquire("mine") as lease:
            assert same()
            lease.wait(stream=0)
    assert same()
    client.unregister("mine")
    client.close()
    assert same()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
