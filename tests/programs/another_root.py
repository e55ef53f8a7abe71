"""Checks a root folder that another user owns; root runs `python another_root.py FOLDER`."""

import os
import sys
from pathlib import Path
from typing import Any

from swapd.shared.runtime_dir import Untrusted, open_folder

MINE = Path("/run/mine")
real_stat = os.stat


def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
    """Reports the owner of `MINE` for the root folder."""
    return real_stat(path if path != "/" else str(MINE), *args, **options)


def main(here: Path) -> None:
    (here / "run" / "mine").mkdir(parents=True)
    for path in (here, here / "run"):
        os.chown(path, 1234, 1234)
    os.chown(here / "run" / "mine", 4321, 4321)
    here.chmod(0o755)
    os.chroot(here)
    os.chdir("/")
    os.setuid(4321)
    open_folder(MINE).close()
    vars(os)["stat"] = stat
    said = refused()
    assert said == "/run belongs to user 1234", said


def refused() -> str:
    try:
        open_folder(MINE)
    except Untrusted as exc:
        return str(exc)
    raise AssertionError("only as the owner of / is 1234 trusted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
