"""Reads YAML, JSON and TOML files of untrusted authors, within bounds of size, depth and
repetition.

A FIFO or device does not block the reader.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from swapd.shared.fds import OwnedFd
from swapd.shared.units import size

#: More than any file that people write; more than any that programs write, such as an index.
PEOPLE_MAX_BYTES = 256 << 10
PROGRAMS_MAX_BYTES = 64 << 20
#: Most levels and values of a document. A value counts once for each reference to it.
DEPTH_MAX = 64
VALUES_MAX = 50_000
#: Includes sign and separators.
_DIGITS_MAX = 25


class BadDocument(ValueError):
    """The message does not name the file."""


@contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """Raises: OSError; BadDocument if the file is not a regular one."""
    try:
        opened = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except ValueError as exc:  # a NUL in the path
        raise BadDocument(str(exc)) from exc
    with opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise BadDocument("it is no regular file")
        with open(opened.take(), "rb") as file:
            yield file


def read(path: Path, most: int = PEOPLE_MAX_BYTES) -> str:
    """Raises: OSError, BadDocument."""
    with regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadDocument(f"it has more than {size(most)}")
    try:
        return data.decode("utf-8-sig")  # editors of Windows write its mark
    except UnicodeDecodeError as exc:
        raise BadDocument(str(exc)) from exc


def read_json(path: Path) -> object:
    """Raises: OSError, BadDocument."""
    found = parsed_json(read(path, PROGRAMS_MAX_BYTES))
    _check(found, _inside, PROGRAMS_MAX_BYTES)
    return found


def mapping(
    read: Callable[[Path], object], path: Path, error: type[Exception], otherwise: str
) -> dict[str, Any]:
    """Raises: `error`. Its text ends in `otherwise` if the file holds no mapping."""
    try:
        found = read(path)
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise error(f"{path}: {exc}") from exc
    if not isinstance(found, dict):
        raise error(f"{path} {otherwise}")
    return found


def parsed_json(text: str | bytes) -> Any:
    """Raises: BadDocument."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as exc:
        raise BadDocument(_TOO_DEEP) from exc
    except ValueError as exc:
        raise BadDocument(str(exc)) from exc


def read_yaml(path: Path) -> object:
    """Raises: OSError; BadDocument, also if PyYAML is missing."""
    try:
        import yaml
    except ModuleNotFoundError as exc:
        raise BadDocument("reading it needs PyYAML; pip install 'swapd[torch]'") from exc
    text = read(path)
    try:
        # Check with the aliases written out, before anything is constructed.
        _check(yaml.compose(text, yaml.SafeLoader), _nodes, VALUES_MAX)
        return yaml.safe_load(text)
    except BadDocument:
        raise
    except RecursionError as exc:
        raise BadDocument(_TOO_DEEP) from exc
    except yaml.YAMLError as exc:
        raise BadDocument(" ".join(str(exc).split())) from exc
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as exc:
        raise BadDocument(f"a value does not match its tag ({exc})") from exc


_TOO_DEEP = f"it is nested deeper than {DEPTH_MAX}"


def _check(root: Any, inside: Callable[[Any], Iterable[Any]], most: int) -> None:
    level, values = [root], 0
    for _ in range(DEPTH_MAX):
        values += len(level)
        if values > most:
            raise BadDocument(f"it has more than {most} values, with its aliases written out")
        level = list(islice((v for one in level for v in inside(one)), most + 1))
        if not level:
            return
    raise BadDocument(_TOO_DEEP)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _nodes(node: Any) -> Iterable[Any]:
    value = getattr(node, "value", "")
    if not isinstance(value, str):  # a sequence of nodes, or of pairs of nodes
        return chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in value)
    if len(value) > _DIGITS_MAX and node.tag == "tag:yaml.org,2002:int":
        raise BadDocument(f"a number of it has {len(value)} digits")
    return ()


def _no_constant(name: str) -> object:
    raise BadDocument(f"{name} is no number")
