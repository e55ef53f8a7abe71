"""The settings of `swapd run` for its daemons: given, read from a file, and compared."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.units import parse_size, size

#: Settings of `swapd serve` that a run's daemon cannot have: it chooses its places itself.
_NOT_HERE = frozenset(
    ("device", "runtime_dir", "swap_log", "linger", "http", "http_token_file", "budget")
)
BUDGET = "budget"


class Settings(msgspec.Struct, frozen=True):
    """Given settings of the daemons; `swapd run` computes the others. Bytes."""

    devices: tuple[str, ...] = ()
    budget: int | None = None
    #: Memory of each GPU, for the plan.
    device_memory: str | None = None
    #: Settings of `swapd serve`, by name.
    others: tuple[tuple[str, str], ...] = ()

    def value(self, name: str) -> str:
        """The value of a setting, for people."""
        if name == BUDGET:
            return "default" if self.budget is None else _typed(self.budget)
        return dict(self.others).get(name, "default")

    def as_toml(self) -> str:
        """The budget and the settings of `swapd serve`, as `from_file` and `swapd serve` read
        them."""
        budget = {} if self.budget is None else {BUDGET: _typed(self.budget)}
        values = {**budget, **dict(self.others)}
        return "".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()
        )


def from_file(path: Path) -> Settings:
    """The settings in a TOML file. Raises: ConfigError, with the file and the setting."""
    raw = config.read_toml(path)
    found = config.parsed(raw, f"{path}: ")
    for name in sorted(found.keys() & (_NOT_HERE - {BUDGET})):
        raise ConfigError(f"{path}: {name}: swapd run chooses it; leave it out")
    others = tuple((name, str(value)) for name, value in raw.items() if name != BUDGET)
    budget = found.get(BUDGET)
    return Settings(budget=None if budget is None else int(budget), others=others)


def with_settings(settings: Settings, given: Iterable[str]) -> Settings:
    """The settings with changes, each like `chunk=64MiB`. Raises: ConfigError."""
    budget, others = settings.budget, dict(settings.others)
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name in _NOT_HERE - {BUDGET}:
            known = ", ".join(n for n in config.Config.__struct_fields__ if n not in _NOT_HERE)
            raise ConfigError(f"--set {text}: write NAME=VALUE, a NAME of {BUDGET}, {known}")
        if name == BUDGET:
            try:
                budget = int(parse_size(value))
            except ValueError as exc:
                raise ConfigError(f"--set {text}: {exc}") from exc
            continue
        config.load(None, {name: value}, {})  # raises the daemon's error before it starts
        others[name] = value
    return msgspec.structs.replace(settings, budget=budget, others=tuple(others.items()))


def names_of(given: Sequence[str]) -> list[str]:
    """The names of the changed settings, each once."""
    return list(dict.fromkeys(t.partition("=")[0].strip().replace("-", "_") for t in given))


def _typed(nbytes: int) -> str:
    """Text that parses to exactly `nbytes`."""
    text = size(nbytes).replace(" ", "")
    return text if parse_size(text) == nbytes else str(nbytes)
