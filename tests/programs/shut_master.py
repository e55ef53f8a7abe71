"""Removes all permissions from a host copy's file, as a worker may; the daemon must refuse it."""

import os

from swapd.daemon.masters import MasterError, Masters
from tests.test_masters import Unpinnable


def refusal(masters: Masters) -> str:
    try:
        masters.seal(1)
    except MasterError as exc:
        return exc.code
    raise AssertionError("nothing was raised")


def main() -> None:
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root may open any file
    masters = Masters(None, Unpinnable())
    os.fchmod(masters.make(1, 4096, mutable=False), 0)
    code = refusal(masters)
    assert code == "bad_request", code
    masters.close()


if __name__ == "__main__":
    main()
