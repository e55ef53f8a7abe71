"""The settings of the daemons of a run: from options, or from a TOML file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.units import parse_size, size

#: Settings of `swapd serve` that a run's daemon cannot have: `swapd run` chooses its places.
_NOT_HERE = frozenset(("device", "runtime_dir", "swap_log", "linger", "http", "http_token_file"))
_PATHS = frozenset(("runtime_dir", "swap_log", "http_token_file"))
_BUDGET = "budget"


class DaemonTable(NamedTuple):
    """Settings of a daemon. Budget in bytes; None if none is given. `flags`: all the others."""

    device: str | None = None
    budget: int | None = None
    flags: Mapping[str, str] = {}

    def value(self, name: str) -> str:
        if name == _BUDGET and self.budget is not None:
            return _typed_size(self.budget)
        return self.flags.get(name, "default")

    def changed(self, given: Iterable[str]) -> "DaemonTable":
        """With the values of `--set`, each like `chunk=64MiB`. Raises: ConfigError."""
        table = self
        for text in given:
            name, equals, value = text.partition("=")
            name = _name(text)
            if not equals or name in _NOT_HERE:
                known = [n for n in config.Config.__struct_fields__ if n not in _NOT_HERE]
                raise ConfigError(f"--set {text}: write NAME=VALUE, a NAME of {', '.join(known)}")
            found = config.load(None, {name: value}, {})  # the daemon's error, before it starts
            if name == _BUDGET:
                table = table._replace(budget=int(found.budget))
            else:
                table = table._replace(flags={**table.flags, name: value})
        return table

    def as_toml(self) -> str:
        """The budget and the flags, for `--config` and `swapd serve --config`."""
        budget = {} if self.budget is None else {_BUDGET: _typed_size(self.budget)}
        return "".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
            for name, value in {**budget, **self.flags}.items()
        )


def table_of(raw: Mapping[str, Any], source: str, folder: Path) -> DaemonTable:
    """The settings of a file's table; paths are relative to `folder`. Raises: ConfigError, with
    `source` before the setting."""
    found = config.parsed(raw, source)
    flags = {
        name: str(folder.absolute() / value) if name in _PATHS else _typed(value)
        for name, value in raw.items()
        if name not in ("device", _BUDGET)
    }
    return DaemonTable(found.get("device"), found.get(_BUDGET), flags)


def read(path: Path) -> DaemonTable:
    """The settings in a file for `--config`. Raises: ConfigError, with the file and the setting."""
    raw = config.read_toml(path)
    found = table_of(raw, f"{path}: ", path.parent)
    for name in sorted(raw.keys() & _NOT_HERE):
        raise ConfigError(f"{path}: {name}: swapd run chooses it; leave it out")
    return found


def names_of(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(_name, given)))


def _name(text: str) -> str:
    return text.partition("=")[0].strip().replace("-", "_")


def _typed(value: object) -> str:
    return f"{value:f}" if isinstance(value, float) else str(value)


def _typed_size(nbytes: int) -> str:
    text = size(int(nbytes)).replace(" ", "")
    return text if parse_size(text) == nbytes else str(int(nbytes))
