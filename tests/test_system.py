"""What is asked of the system about a process. One that nobody can ask after is not gone."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from swapd.shared.system import is_alive, open_pidfd


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))


def test_a_process_is_alive_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_alive(process.pid)
        process.kill()
        process.wait()
        assert not is_alive(process.pid)
        assert open_pidfd(process.pid) is None


@pytest.mark.parametrize(("owner", "verb"), [(os, "pidfd_open"), (Path, "read_bytes")])
def test_without_descriptors_a_process_that_lives_is_not_taken_as_gone(
    monkeypatch: pytest.MonkeyPatch, owner: object, verb: str
) -> None:
    """Or its memory would be given to others while it can still be written to."""
    monkeypatch.setattr(owner, verb, refuse)
    assert is_alive(os.getpid())
