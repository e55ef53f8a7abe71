"""Settings that proved good, kept by model in one file of the state folder.

Each change replaces the whole file, under a lock; it is for this user alone. A file of another
user, of another kind, or of a later version is neither used nor overwritten.
"""

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from swapd.run.settings import Settings
from swapd.shared import trusted
from swapd.shared.fds import OwnedFd
from swapd_client.errors import SwapdError

NAME, LOCK = "settings.json", "settings.lock"
VERSION = 1
#: One more model replaces the oldest.
MODELS_MAX = 200
_MOST_BYTES = 1 << 20


class Kept(msgspec.Struct, frozen=True):
    """The kept settings of a model. `why`: their success, for people. `when`: Unix time."""

    settings: Settings
    why: str
    when: float


class _File(msgspec.Struct, frozen=True):
    version: int
    models: dict[str, Kept]


class _Version(msgspec.Struct, frozen=True):
    version: int


class CannotKeep(SwapdError):
    """The file cannot be used; the message has its name, the reason and advice."""


def key_of(model: str) -> str:
    """A model's name, or its absolute folder."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model


def all_of(state: Path) -> dict[str, Kept]:
    """The kept settings, by model. Raises: CannotKeep."""
    try:
        with trusted.folder_named(state / NAME) as folder:
            return dict(_read(folder, state / NAME))
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise _cannot(state / NAME, exc) from exc


def keep(state: Path, model: str, kept: Kept) -> None:
    """Keep settings in place of the old ones. Raises: CannotKeep."""
    with _changing(state) as models:
        models.pop(model, None)
        models[model] = kept
        while len(models) > MODELS_MAX:
            del models[min(models, key=lambda name: models[name].when)]


def forget(state: Path, model: str) -> bool:
    """Remove a model's settings; return whether there were any. Raises: CannotKeep."""
    with _changing(state) as models:
        return models.pop(model, None) is not None


@contextmanager
def _changing(state: Path) -> Iterator[dict[str, Kept]]:
    """The kept settings, to change; the lock excludes other processes."""
    path = state / NAME
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            trusted.folder_named(path) as folder,
            trusted.open_in(folder, LOCK, os.O_RDWR | os.O_CREAT) as lock,
        ):
            _check(lock, state / LOCK)
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            models = dict(_read(folder, path))
            before = dict(models)
            yield models
            if models != before:
                _replace(folder, msgspec.json.encode(_File(VERSION, models)) + b"\n")
    except OSError as exc:
        raise _cannot(path, exc) from exc


def _read(folder: OwnedFd, path: Path) -> dict[str, Kept]:
    try:
        opened = trusted.open_in(folder, NAME, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with opened:
        _check(opened, path)
        data = b""
        while len(data) <= _MOST_BYTES and (more := os.read(opened.fileno(), _MOST_BYTES + 1)):
            data += more
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise CannotKeep(
                f"{path} is of version {version}, and this swapd reads {VERSION}: use the swapd "
                "that wrote it, or remove it"
            )
        return msgspec.json.decode(data, type=_File).models
    except msgspec.MsgspecError as exc:
        raise CannotKeep(f"{path} is not a file of swapd ({exc}): remove it") from exc


def _check(opened: OwnedFd, path: Path) -> None:
    found = os.fstat(opened.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise CannotKeep(f"{path} is not a file of swapd: remove it")
    if found.st_uid != os.getuid():
        raise CannotKeep(f"{path} belongs to user {found.st_uid}: remove it")


def _replace(folder: OwnedFd, data: bytes) -> None:
    name = f"{NAME}.{secrets.token_hex(4)}"
    try:
        with trusted.open_in(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new:
            with open(new.fileno(), "wb", closefd=False) as file:
                file.write(data)
            os.fsync(new.fileno())
        os.rename(name, NAME, src_dir_fd=folder.fileno(), dst_dir_fd=folder.fileno())
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder.fileno())
        raise


def _cannot(path: Path, exc: OSError) -> CannotKeep:
    return CannotKeep(f"{path} cannot be used: {exc.strerror or exc}")
