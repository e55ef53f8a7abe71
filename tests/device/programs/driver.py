"""Opens the driver, or fails to, and prints its message.

`python driver.py CASE ...` runs the function CASE.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from swapd.device import DeviceError, open_device
from swapd.device.driver import Driver


def refused(call: Callable[..., Any], *args: Any) -> None:
    """Print the error that ends the call."""
    try:
        call(*args)
    except DeviceError as exc:
        print(type(exc).__name__ + ":", exc)  # noqa: T201
    else:
        raise AssertionError("not refused")


def refused_card(index: str) -> None:
    refused(Driver, int(index))


def without_bindings() -> None:
    sys.modules["cuda.bindings.driver"] = None  # type: ignore[assignment]
    refused(Driver, 0)


def refused_device() -> None:
    refused(open_device, "cuda", 1 << 30, 64 << 20, None)


def opened() -> None:
    Driver(0).close()
    print("opened")  # noqa: T201


def by_uuid() -> None:
    first, second = Driver(0), Driver(1)
    again = Driver.by_uuid(second.uuid)
    print(again.index, first.uuid != second.uuid, second.uuid[:4])  # noqa: T201
    refused(Driver.by_uuid, "GPU-none")
    for one in (first, second, again):
        one.close()


def spoiled(code: str) -> None:
    """After an error of this number the driver is not called."""
    driver = Driver(0)
    result = driver.api.CUresult(int(code))

    class Spoiled:
        __name__ = "cuSpoiled"

        def __call__(self) -> tuple[Any]:
            return (result,)

    def never(*args: object) -> None:
        raise AssertionError("the driver was called")

    refused(driver.call, Spoiled())
    driver.api.cuMemGetInfo = never
    refused(driver.memory)
    refused(driver.create, 2 << 20)
    refused(driver.current().__enter__)
    driver.close()
    print(driver.lost, result.name)  # noqa: T201


def pin() -> None:
    driver = Driver(0)
    with driver.current():
        refused(lambda: driver.pin(4096, 4096, writable=True))
    driver.close()


def fork() -> None:
    driver = Driver(0)
    child = os.fork()
    if not child:
        refused(driver.current().__enter__)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    driver.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
