"""Another user. `python stranger.py CASE HERE ...`, as root, becomes nobody and runs CASE in HERE.

It imports first: only root may be able to read the installed files.
"""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

import swapd_client
from swapd.cli import serve
from swapd.shared.config import Config

NOBODY = 65534


def folder(here: Path, name: str) -> None:
    (here / name).mkdir()


def link(here: Path, name: str, target: str) -> None:
    (here / name).symlink_to(target)


def flip(here: Path, target: str) -> NoReturn:
    """At one path, alternate a folder and a link without pause."""
    run, one, other = (here / "theirs" / name for name in ("run", "f", "l"))
    one.mkdir()
    other.symlink_to(target)
    print("ready", flush=True)  # noqa: T201
    while True:
        for each in (one, other):
            each.rename(run)
            run.rename(each)


def listen(here: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(here / name))
        door.listen()
        (here / name).chmod(0o777)
        print("ready", flush=True)  # noqa: T201
        door.accept()
        print("somebody came", flush=True)  # noqa: T201


def run_a_daemon(here: Path) -> None:
    runtime_dir = here / "swapd-65534" / "host"
    serve.run(Config(budget=4 << 20, runtime_dir=str(runtime_dir)))


def use_the_daemon(here: Path) -> None:
    with swapd_client.connect(here / "swapd-65534" / "host") as client:
        client.register("a", {"w": bytearray(b"x" * 4096)})
        with client.acquire("a"):
            print(client.status().used_bytes)  # noqa: T201


def main(case: str, here: str, *arguments: str) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    globals()[case](Path(here), *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
