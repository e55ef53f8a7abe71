"""FILE.toml: the daemons of a run and its stages, read and checked before anything starts.

`[daemon]` has the settings of `swapd serve`, or `[[daemon]]` those for each of several GPUs;
`[stages.NAME]` has a command. Paths are relative to the file's folder.
"""

import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from swapd.run.commands import Command, command_of
from swapd.shared import config
from swapd.shared.config import ENDPOINT_VARIABLE, STAGE_VARIABLE, ConfigError, read_toml
from swapd.shared.text import meant
from swapd.shared.units import parse_size, parse_span, size

#: Settings of `swapd serve` that `--set` and `--config` cannot give: `swapd run` chooses them.
_NOT_HERE = frozenset(("device", "runtime_dir", "swap_log", "linger", "http", "http_token_file"))
_PATHS = frozenset(("runtime_dir", "swap_log", "http_token_file"))
_BUDGET = "budget"


class DaemonTable(NamedTuple):
    """`budget`: bytes; None if not given. `flags`: all other settings."""

    device: str | None = None
    budget: int | None = None
    flags: Mapping[str, str] = {}

    def value(self, name: str) -> str:
        if name == _BUDGET and self.budget is not None:
            return _typed_size(self.budget)
        return self.flags.get(name, "default")

    def changed(self, given: Iterable[str]) -> "DaemonTable":
        """Apply values of `--set`, each like `chunk=64MiB`. Raises: ConfigError."""
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
        budget = {} if self.budget is None else {_BUDGET: _typed_size(self.budget)}
        return "".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
            for name, value in {**budget, **self.flags}.items()
        )


def table_of(raw: Mapping[str, Any], source: str, folder: Path) -> DaemonTable:
    """Return the settings in a file's table; paths are relative to `folder`. Raises: ConfigError,
    with `source` before the setting."""
    found = config.parsed(raw, source)
    flags = {
        name: f"{value:f}" if isinstance(value, float) else str(value)
        for name, value in raw.items()
        if name not in ("device", _BUDGET)
    }
    flags |= {
        name: str(folder.absolute() / value) for name, value in flags.items() if name in _PATHS
    }
    return DaemonTable(found.get("device"), found.get(_BUDGET), flags)


def read_settings(path: Path) -> DaemonTable:
    """Read a file for `--config`. Raises: ConfigError, with the file and the setting."""
    raw = config.read_toml(path)
    found = table_of(raw, f"{path}: ", path.parent)
    for name in sorted(raw.keys() & _NOT_HERE):
        raise ConfigError(f"{path}: {name}: swapd run chooses it; leave it out")
    return found


def _with_variables(table: DaemonTable) -> DaemonTable:
    """Take from variables what neither an option nor the file gives, as the daemon does with its
    other settings. Raises: ConfigError."""
    for name in ("device", _BUDGET):
        variable = f"SWAPD_{name.upper()}"
        if getattr(table, name) is None and (said := config.variable(variable)):
            found = config.load(None, {}, {variable: said})
            table = table._replace(**{name: getattr(found, name)})
    return table


def names_of(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(_name, given)))


def _name(text: str) -> str:
    return text.partition("=")[0].strip().replace("-", "_")


def _typed_size(nbytes: int) -> str:
    text = size(int(nbytes)).replace(" ", "")
    return text if parse_size(text) == nbytes else str(int(nbytes))


#: A stage's name, which is also in the labels of its sessions, before a slash.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_ONE = frozenset(("runtime_dir", "swap_log", "http"))
_OURS = frozenset((ENDPOINT_VARIABLE, STAGE_VARIABLE))
#: Largest `backoff` and `stop_timeout`; a longer time is a mistake.
SPAN_MAX_S = 86400.0

Restart = Literal["no", "on-failure", "always"]
#: What later stages wait for: its start; a component that a session of it registers; its end with
#: status 0.
Ready = Literal["started", "registered", "ended"]
#: The stage of a single command, and its deploy file.
COMMAND = "deploy"


class StageSpec(NamedTuple):
    name: str
    command: Command
    environment: dict[str, str]
    directory: Path
    restart: Restart = "no"
    #: After failures in a row; None: no limit.
    retries: int | None = None
    backoff_s: float = 1.0
    after: tuple[str, ...] = ()
    #: "answers": only for a server that is compared.
    ready: Ready | Literal["answers"] = "started"
    stop_timeout_s: float = 30.0
    #: Whether the run ends when this stage ends, with any status.
    ends_all: bool = False


class RunFile(NamedTuple):
    """Has at least one daemon and one stage; `after` has no cycle."""

    #: None for a single command, whose daemons are set by options.
    path: Path | None
    daemons: tuple[DaemonTable, ...]
    stages: dict[str, StageSpec]


class Table(msgspec.Struct, frozen=True):
    command: str | list[str]
    env: dict[str, str | int | float] = {}
    directory: str = "."
    restart: Restart = "no"
    retries: Annotated[int, Meta(ge=1)] | None = None
    backoff: str | int | float = 1.0
    after: list[str] = []
    ready: Ready = "started"
    stop_timeout: str | int | float = 30.0
    ends_all: bool = False


def of_command(words: Sequence[str], daemons: Iterable[DaemonTable]) -> RunFile:
    daemons = [_with_variables(table) for table in daemons]
    _one_for_each(daemons, "-d")
    stage = StageSpec(COMMAND, command_of(words), {}, Path().absolute())
    return RunFile(None, tuple(daemons), {COMMAND: stage})


def read(path: Path) -> RunFile:
    """Read and check the whole file. Raises: ConfigError, with the file, the key and advice."""
    raw = read_toml(path)
    _known(raw, ("daemon", "stages"), f"{path}: ")
    tables = raw.get("stages", {})
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f'{path}: there is no stage: write [stages.NAME] and command = "..."')
    stages = {name: _stage(path, name, table) for name, table in tables.items()}
    _check_after(path, stages)
    return RunFile(path, _daemons(path, raw.get("daemon", {})), stages)


# --- daemons -------------------------------------------------------------------------------


def _daemons(path: Path, raw: Any) -> tuple[DaemonTable, ...]:
    tables = raw if isinstance(raw, list) else [raw]
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: daemon is no table: write [daemon], or [[daemon]] for each GPU")
    found = []
    for number, table in enumerate(tables):
        source = f"{path}: daemon[{number}]." if tables is raw else f"{path}: daemon."
        found.append(_with_variables(table_of(table, source, path.parent)))
        if len(tables) > 1:
            if "device" not in table:
                raise ConfigError(f'{source}device is missing: name a GPU, as in device = "cuda:0"')
            for name in sorted(OF_ONE & table.keys()):
                why = "only a file with one daemon may set it; leave it out"
                raise ConfigError(f"{source}{name}: {why}")
    _one_for_each(found, f"{path}: [[daemon]]")
    return tuple(found)


def _one_for_each(daemons: Sequence[DaemonTable], source: str) -> None:
    """Raise ConfigError unless several daemons are for different GPUs: a worker finds its own by
    the number of its GPU."""
    devices = [one.device for one in daemons if one.device is not None]
    for at, device in enumerate(devices):
        if not config.DEVICE_NAME.fullmatch(device):
            raise ConfigError(f"{source} {device!r}: there is no such device; use host or cuda:0")
        number = config.gpu_number(device)
        if len(devices) > 1 and number is None:
            raise ConfigError(f"{source} {device}: several are for GPUs alone; leave it out")
        if number in map(config.gpu_number, devices[:at]):
            raise ConfigError(f"{source} {device}: another is for this GPU; leave one of them out")


# --- stages --------------------------------------------------------------------------------


def _stage(path: Path, name: str, raw: Any) -> StageSpec:
    source = f"{path}: stages.{name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path}: stages: {name!r} cannot be a name: at most 40 letters, digits, dots, _ and -"
        )
    if not isinstance(raw, dict):
        raise ConfigError(f"{source} is no table: write [stages.{name}]")
    _known(raw, Table.__struct_fields__, f"{source}.")
    if "command" not in raw:
        raise ConfigError(f'{source}.command is missing: write command = "..."')
    try:
        table = msgspec.convert(raw, Table)
    except msgspec.ValidationError as exc:
        said, _, where = str(exc).partition(" - at `$")
        where = where.rstrip("`")
        said += config.choices(Table, where.removeprefix("."))
        raise ConfigError(f"{source}{where}: {said}") from None
    _check_restart(raw, table, source)
    environment = _environment(table.env, f"{source}.env")
    directory = _directory(path.parent, table.directory, f"{source}.directory")
    words = _words(table.command, f"{source}.command")
    _check_program(words[0], directory, environment, f"{source}.command")
    try:
        command = command_of(words)
    except ConfigError as exc:
        raise ConfigError(f"{source}.command: {exc}") from None
    return StageSpec(
        name,
        command,
        environment,
        directory,
        table.restart,
        table.retries,
        _span(table.backoff, f"{source}.backoff"),
        tuple(table.after),
        table.ready,
        _span(table.stop_timeout, f"{source}.stop_timeout"),
        table.ends_all,
    )


def _check_restart(raw: Mapping[str, Any], table: Table, source: str) -> None:
    if table.restart == "no":
        for name in sorted({"retries", "backoff"} & raw.keys()):
            raise ConfigError(
                f'{source}.{name} is for a stage that restarts: set restart = "on-failure"'
            )
    if table.restart == "always":
        for name in sorted(n for n in ("ready", "ends_all") if raw.get(n) in ("ended", True)):
            raise ConfigError(
                f"{source}.{name}: a stage that always restarts never ends: set restart = "
                '"on-failure"'
            )


def _words(command: str | list[str], source: str) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as exc:
        raise ConfigError(f"{source}: {exc}: a quotation mark is missing") from exc
    if not words or not words[0]:
        raise ConfigError(f"{source} is empty: give a command")
    _no_zero(words, source)
    return words


def _environment(env: Mapping[str, str | int | float], source: str) -> dict[str, str]:
    for name, value in env.items():
        if name in _OURS:
            raise ConfigError(f"{source}.{name} is set by swapd run itself: leave it out")
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{source}: {name!r} is not the name of a variable: write letters, digits and _"
            )
        _no_zero([str(value)], f"{source}.{name}")
    return {name: str(value) for name, value in env.items()}


def _no_zero(words: Iterable[str], source: str) -> None:
    if any("\0" in word for word in words):
        raise ConfigError(f"{source} has a zero byte in it, which no program can be given")


def _directory(folder: Path, named: str, source: str) -> Path:
    _no_zero([named], source)
    try:
        found = (folder / Path(named).expanduser()).absolute()
        mode = found.stat().st_mode
    except (OSError, RuntimeError) as exc:  # RuntimeError: no such user
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"{source}: {named}: {why}; it is relative to the file's folder") from exc
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{source}: {found} is not a folder: name the one to run it in")
    return found


def _check_program(
    program: str, directory: Path, environment: Mapping[str, str], source: str
) -> None:
    at = str(directory / program) if "/" in program else program
    if shutil.which(at, path=environment.get("PATH")) is not None:
        return
    if os.path.exists(at):
        raise ConfigError(f"{source}: {at} cannot be run: make it executable")
    how = "" if "/" in program else ": install it, or write its whole path"
    raise ConfigError(f"{source}: there is no program {at!r}{how}")


def _span(value: str | float, source: str) -> float:
    try:
        found = parse_span(value) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"{source}: {exc}") from exc
    if not 0.0 <= found <= SPAN_MAX_S:
        raise ConfigError(f"{source}: {value} is out of range: write 0 to 1d, as in 500ms or 30s")
    return found


# --- order ---------------------------------------------------------------------------------


def _check_after(path: Path, stages: Mapping[str, StageSpec]) -> None:
    for stage in stages.values():
        source = f"{path}: stages.{stage.name}.after"
        for name in stage.after:
            if name not in stages:
                raise ConfigError(f'{source}: there is no stage "{name}"; {meant(name, stages)}')
    graph = {name: stage.after for name, stage in stages.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        circle = " after ".join(reversed(exc.args[1]))
        raise ConfigError(
            f"{path}: stages.{exc.args[1][-1]}.after: none of these would ever start: {circle}; "
            "take one of them out"
        ) from None


def _known(raw: Mapping[str, Any], names: Iterable[str], source: str) -> None:
    for name in raw:
        if name not in names:
            raise ConfigError(f"{source}{name} is not a key of this; {meant(name, names)}")
