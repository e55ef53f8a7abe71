"""Files that tests write, and those that processes have open."""

from contextlib import suppress
from pathlib import Path

from swapd.daemon.host_copies import NAME


def file_with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def host_copies(pid: int) -> dict[int, int]:
    """Return the bytes in memory of each host copy that a process has open, mapped or not, by
    inode."""
    found: dict[int, int] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if NAME in str(fd.readlink()):
                at = fd.stat()
                found[at.st_ino] = at.st_blocks * 512
    return found
