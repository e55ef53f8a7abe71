"""The settings of `swapd run` for its daemons: given, kept, and compared."""

import shlex
from collections.abc import Iterable, Sequence

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

    @property
    def options(self) -> str:
        """The settings as options of `swapd run`."""
        words = [word for device in self.devices for word in ("--device", device)]
        words += ["--budget", _typed(self.budget)] if self.budget is not None else []
        words += ["--device-memory", self.device_memory] if self.device_memory else []
        words += [word for name, value in self.others for word in ("--set", f"{name}={value}")]
        return shlex.join(words)

    def over(self, kept: "Settings") -> "Settings":
        """These settings, completed by the `kept` ones."""
        return Settings(
            self.devices or kept.devices,
            kept.budget if self.budget is None else self.budget,
            self.device_memory or kept.device_memory,
            tuple({**dict(kept.others), **dict(self.others)}.items()),
        )

    def value(self, name: str) -> str:
        """The value of a setting, for people."""
        if name == BUDGET:
            return "default" if self.budget is None else _typed(self.budget)
        return dict(self.others).get(name, "default")


def with_settings(settings: Settings, given: Iterable[str], option: str) -> Settings:
    """The settings with changes, each like `chunk=64MiB`. Raises: ConfigError, with the option."""
    budget, others = settings.budget, dict(settings.others)
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name in _NOT_HERE - {BUDGET}:
            known = ", ".join(n for n in config.Config.__struct_fields__ if n not in _NOT_HERE)
            raise ConfigError(f"{option} {text}: write NAME=VALUE, a NAME of {BUDGET}, {known}")
        if name == BUDGET:
            try:
                budget = int(parse_size(value))
            except ValueError as exc:
                raise ConfigError(f"{option} {text}: {exc}") from exc
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
