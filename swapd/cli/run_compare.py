"""`swapd run --compare`: runs a command in two ways in turn, and prints the table of both."""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swapd.cli.common import console, errors, say_error
from swapd.cli.run_plan import planned, printed, write
from swapd.cli.run_told import environment_on, outcome_of
from swapd.run import compared, measured, ready
from swapd.run.child import CannotRun
from swapd.run.commands import Command
from swapd.run.compared import Comparison, Round, Side
from swapd.run.daemons import Serving, Wanted, joinable, serving
from swapd.run.measured import Until
from swapd.run.needs import names_swapd
from swapd.run.plans import RunPlan, on_devices
from swapd.run.sampling import Sampler
from swapd.run.settings import Settings, names_of, with_settings
from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.text import plain
from swapd.shared.units import parse_span
from swapd.spawn import SpawnError
from swapd_client.errors import SwapdError

_MIB = 1 << 20
#: Most comparisons that `--list` shows.
_LISTED_MAX = 20


class Asked(NamedTuple):
    """The options of a comparison, as given."""

    #: Settings of the second side; none: the first side runs without swapd.
    changes: Sequence[str] = ()
    rounds: int = 1
    until: str | None = None
    span: str | None = None
    ready: str | None = None


class Way(NamedTuple):
    """One of the two ways, as it is planned."""

    side: Side
    daemons: Sequence[Wanted]
    #: Files to write, by their paths.
    files: Mapping[Path, str]
    #: Runs it to its end, on daemons that serve; the round has no outcomes yet.
    run: Callable[[Sequence[Serving], Sampler], Round]
    #: Prints what it would do.
    show: Callable[[], None]


def compare(
    command: Command, folder: Path, settings: Settings, asked: Asked, *, dry_run: bool
) -> int:
    """Run it in both ways, print and keep the table; return the exit status.

    That is the status of the first command that failed. Raises: ConfigError, PlanError, SwapdError
    before it runs anything.
    """
    folder = folder_of(folder)
    until = _until(command, asked)
    ways = [
        _way(side, _planned(command, side_folder(folder, number), side, settings.devices), until)
        for number, side in enumerate(_sides(settings, asked.changes), 1)
    ]
    if not dry_run:
        _check_free(until)
    found, status = in_turns(command.words, ways, folder, asked.rounds, dry_run=dry_run)
    if found is not None and status is None:
        _keep_settings(folder.name, found, ways)
    return status or (found.status if found else 0)


def in_turns(
    words: tuple[str, ...], ways: Sequence[Way], folder: Path, rounds: int, *, dry_run: bool
) -> tuple[Comparison | None, int | None]:
    """Run two ways one after the other, print and keep the table; the comparison, and the status if
    a signal ended it.

    `words` name what is compared. Raises: SwapdError before anything is run.
    """
    if dry_run:
        for way in ways:
            console.print(plain(f"# {way.side.name}"), style="dim", soft_wrap=True)
            way.show()
        return None, None
    for way in ways:
        for wanted in way.daemons:
            if there := joinable(wanted._replace(budget=0)):
                raise SwapdError(
                    f"a swapd serves {wanted.device} at {there}, and would be measured too: end it "
                    f"first, with `swapd stop --endpoint {there}`"
                )
        write(way.files)
    made, interrupted = _all_rounds(ways, rounds, folder)
    first, second = (_with(way.side, done) for way, done in zip(ways, made, strict=True))
    found = Comparison(compared.VERSION, tuple(map(plain, words)), (first, second))
    if any(made):
        console.print(table(found))
        _keep(folder.name, found)
    return found, interrupted


def folder_of(folder: Path) -> Path:
    """The folder of a comparison, from that of a run."""
    return folder.with_name(f"{folder.name}-{os.getpid()}")


def side_folder(folder: Path, number: int) -> Path:
    """The folder for the files of a side; sides count from 1."""
    return folder / f"side{number}"


# --- the two sides -----------------------------------------------------------------------


def _until(command: Command, asked: Asked) -> Until:
    if asked.until is not None and asked.span is not None:
        raise ConfigError("give either --until COMMAND or --for SECONDS, not both")
    try:
        span_s = None if asked.span is None else parse_span(asked.span)
    except ValueError as exc:
        raise ConfigError(f"--for: {exc}") from exc
    load = _words(asked.until)
    found = ready.parsed(asked.ready) if asked.ready else ready.ready_of(command)
    until = Until(load, span_s, found)
    if command.kind != "other" and not until:
        raise ConfigError(
            "a server does not end by itself: give --until COMMAND, a client whose end ends the "
            "server, or --for SECONDS"
        )
    if load and found is None:
        raise ConfigError(
            "--until needs to know when the command is ready: give --ready, a port, HOST:PORT, "
            "http://HOST:PORT/PAGE or the path of a socket"
        )
    if asked.ready and not until:
        raise ConfigError("--ready is for --until and --for")
    return until


def _words(command: str | None) -> tuple[str, ...]:
    try:
        words = () if command is None else tuple(shlex.split(command))
    except ValueError as exc:
        raise ConfigError(f"--until {command}: {exc}") from exc
    if command is not None and not words:
        raise ConfigError("--until: give a command")
    return words


def _sides(settings: Settings, changes: Sequence[str]) -> tuple[Side, Side]:
    if not changes:
        return Side(compared.WITHOUT, None), Side(compared.WITH, settings)
    other = with_settings(settings, changes)
    names = names_of(changes)
    if all(settings.value(name) == other.value(name) for name in names):
        raise ConfigError(f"--set {' '.join(changes)}: both sides have that already: say another")
    return _named(settings, names), _named(other, names)


def _named(settings: Settings, names: Iterable[str]) -> Side:
    return Side(" ".join(f"{name}={settings.value(name)}" for name in names), settings)


def _planned(command: Command, folder: Path, side: Side, devices: Sequence[str]) -> RunPlan:
    if side.settings is not None:
        return planned(command, folder, side.settings)
    if said := names_swapd(command, Path()):
        raise ConfigError(
            f"{said} needs swapd, so the command cannot run without it: leave it out, as `swapd "
            "run` adds the needed options; or compare two settings, with --set NAME=VALUE"
        )
    return RunPlan(command, [], {}, on_devices(command, devices, "-d"))


def _with(side: Side, rounds: Sequence[Round]) -> Side:
    return msgspec.structs.replace(side, rounds=tuple(rounds))


# --- run ---------------------------------------------------------------------------------


def _all_rounds(
    ways: Sequence[Way], count: int, folder: Path
) -> tuple[tuple[list[Round], list[Round]], int | None]:
    """The rounds of each side; and the status if a signal ended them. The sides alternate, so a
    change of the machine affects both. A round with a failure is the last."""
    rounds: tuple[list[Round], list[Round]] = ([], [])
    devices = [wanted.device for wanted in ways[1].daemons]
    for number in range(1, count + 1):
        for n, way in enumerate(ways):
            of = f", round {number} of {count}" if count > 1 else ""
            errors.print(plain(f"swapd: {n + 1} of 2: {way.side.name}{of}"), soft_wrap=True)
            found = _round(way, devices, side_folder(folder, n + 1))
            if found.signal is not None:
                return rounds, found.status or 128 + found.signal
            rounds[n].append(found)
            if found.status:
                why = f": {found.why}" if found.why else ""
                say_error(f"{way.side.name}: failed with status {found.status}{why}")
        if any(each.status for done in rounds for each in done):
            break
    return rounds, None


def _round(way: Way, devices: Sequence[str], logs: Path) -> Round:
    """Its figures, or the reason why it could not run."""
    try:
        return _measured(way, devices, logs)
    except SpawnError as exc:  # the figures of the other side are kept
        return Round(1, why=f"no daemon was started: {exc}")
    except CannotRun:
        raise
    except SwapdError as exc:
        return Round(1, why=str(exc))


def _measured(way: Way, devices: Sequence[str], logs: Path) -> Round:
    sampler = Sampler(devices)
    with serving(way.daemons, logs) as daemons:
        since = time.time()  # noqa: TID251 - of records
        found = way.run(daemons, sampler)
        outcomes = [told for one in daemons if (told := outcome_of(one, since)) is not None]
    return msgspec.structs.replace(found, outcomes=tuple(outcomes))


def _way(side: Side, plan: RunPlan, until: Until) -> Way:
    def run(daemons: Sequence[Serving], sampler: Sampler) -> Round:
        with _to_itself(until):
            environment = {**environment_on(daemons), **plan.environment}
            return measured.run(plan.command.words, environment, until, sampler)

    return Way(side, plan.daemons, plan.files, run, partial(printed, plan))


def _check_free(until: Until) -> None:
    if until.ready is not None and ready.listens(until.ready):
        raise SwapdError(
            f"{until.ready} answers already, and would be taken for the command: end it first"
        )


@contextmanager
def _to_itself(until: Until) -> Iterator[None]:
    """Have the server's address alone. Afterwards, remove a socket that the server leaves: the next
    server could not listen there. Raises: SwapdError if another server answers."""
    if until.ready is None:
        yield
        return
    _check_free(until)
    socket = Path(until.ready.path) if until.ready.path else None
    ours = socket is not None and not socket.exists()
    yield
    if socket is not None and ours and socket.is_socket() and not ready.listens(until.ready):
        socket.unlink(missing_ok=True)


# --- tables and records -------------------------------------------------------------------


def table(found: Comparison) -> RenderableType:
    """Both side by side."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    made.add_column("", no_wrap=True)
    for heading in (*(side.name for side in found.sides), "ratio"):
        made.add_column(plain(heading), justify="right")
    for row in compared.rows(found):
        made.add_row(*row)
    count = max(len(side.rounds) for side in found.sides)
    about = f"medians of {count} rounds; {compared.ABOUT}" if count > 1 else compared.ABOUT
    return Group(made, Text(about, "dim"))


def _folder() -> Path:
    """The folder of all comparisons, each in a file of its own."""
    return config.state_folder() / "comparisons"


def _keep(name: str, found: Comparison) -> None:
    _write(name, ".json", msgspec.json.encode(found) + b"\n", "`swapd run --list` shows it")


def _keep_settings(name: str, found: Comparison, ways: Sequence[Way]) -> None:
    """Write the better settings into a file for `--config`, if the comparison shows any."""
    if (good := compared.better(found)) is None:
        return
    side, why = good
    settings = _used(side, ways[found.sides.index(side)])
    data = f"# {why}: {shlex.join(found.command)}\n{settings.as_toml()}".encode(errors="replace")
    _write(name, ".toml", data, f"the better settings ({why}), for `swapd run --config`")


def _write(name: str, suffix: str, data: bytes, use: str) -> None:
    """Write a file of a comparison, and say where it is and its `use`."""
    path = _folder() / f"{name}{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
    except OSError as exc:
        say_error(f"{path} is not written: {exc.strerror}; $XDG_STATE_HOME names another place")
    else:
        errors.print(plain(f"swapd: {path}: {use}"), soft_wrap=True)


def _used(side: Side, way: Way) -> Settings:
    """The settings, with the computed budget if all daemons have the same."""
    assert side.settings is not None
    budgets = {wanted.budget for wanted in way.daemons}
    if side.settings.budget is not None or len(budgets) != 1:
        return side.settings
    whole = -(-budgets.pop() // _MIB) * _MIB  # as people would type it
    return msgspec.structs.replace(side.settings, budget=whole)


def list_all() -> None:
    """Print the last comparisons, the oldest first."""
    paths = sorted(_folder().glob("*.json"))[-_LISTED_MAX:]
    if not paths:
        console.print("nothing was compared yet; start with: swapd run --compare -- COMMAND")
    for path in paths:
        _list(path)


def _list(path: Path) -> None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Comparison)
        if found.version != compared.VERSION:
            raise msgspec.ValidationError(f"it is of version {found.version}")
    except (OSError, msgspec.MsgspecError) as exc:
        say_error(f"{path} cannot be read: {exc}; remove it")
        return
    head = f"{path.stem}  status {found.status}"
    console.print(plain(f"{head}  {shlex.join(found.command)}"), soft_wrap=True)
    console.print(table(found))
    if (settings := path.with_suffix(".toml")).exists():
        console.print(plain(f"the better settings: {settings}"), soft_wrap=True)
