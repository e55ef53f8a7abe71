"""Removes all permissions from a host copy's file, as a worker may; the daemon must refuse it."""

import os

from swapd.daemon.host_copies import HostCopyError
from tests.test_host_copies import Copies, Unpinnable


def refusal(copies: Copies) -> str:
    try:
        copies.sealed(1)
    except HostCopyError as exc:
        return exc.code
    raise AssertionError("nothing was raised")


def main() -> None:
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root may open any file
    copies = Copies(None, Unpinnable())
    os.fchmod(copies.made(1, 4096, mutable=False), 0)
    code = refusal(copies)
    assert code == "bad_request", code
    copies.close()


if __name__ == "__main__":
    main()
