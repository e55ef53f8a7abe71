"""`swapd run --compare`: runs a command or a file in two ways in turn, and prints a table of both.

A server runs as a stage, and the command that uses it as another stage, whose end ends both.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from swapd.cli import comparisons
from swapd.cli.common import console, note, say, say_error
from swapd.cli.comparisons import Comparison, Round, Side
from swapd.cli.run_plan import RunPlan, planned
from swapd.cli.run_stages import environment_on, logs_since, run_stages
from swapd.run import child, outcome, ready, servers
from swapd.run.child import SIGNALLED, CannotRun
from swapd.run.commands import command_of
from swapd.run.daemons import ServingDaemon, joinable, serving
from swapd.run.file import COMMAND, RunFile, StageSpec, names_of
from swapd.run.ready import ServerAddress
from swapd.run.sampling import Sampler
from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.system import repeated
from swapd.shared.text import plain
from swapd.spawn import SpawnError
from swapd_client.errors import SwapdError

_MIB = 1 << 20
#: From SIGTERM to SIGKILL.
_ENDS_IN_S = 60.0
_INSTEAD = "compare two settings, with --set NAME=VALUE"


class ComparisonOptions(NamedTuple):
    #: Settings of the second side. Without them, the first side runs without swapd.
    changes: Sequence[str] = ()
    rounds: int = 1
    until: str | None = None
    span: float | None = None
    ready: str | None = None


class ServerLoad(NamedTuple):
    """The stage that ends a server: a command that uses it, or one that only waits."""

    words: tuple[str, ...]
    #: Whether it uses the server, so that its time is measured.
    counts: bool
    #: Where the server answers; None: it counts as ready at once.
    address: ServerAddress | None


class Variant(NamedTuple):
    side: Side
    plan: RunPlan
    load: ServerLoad | None
    folder: Path


def compare(
    found: RunFile,
    folder: Path,
    options: ComparisonOptions,
    device_memory: int | None,
    *,
    dry_run: bool,
) -> int:
    """Run the command or file in both ways, and print and save the table.

    Returns the exit status: that of the first command that failed, or of an interrupt. Raises:
    ConfigError, PlanError, SwapdError before anything runs.
    """
    ways = _ways(found, folder, options, device_memory)
    if dry_run:
        for way in ways:
            say(f"# {way.side.name}", "dim")
            way.plan.show()
        return 0
    _check_alone(ways)
    for way in ways:
        way.plan.write()
    rounds, interrupted = _all_rounds(ways, options.rounds)
    if found.path is None:
        words = found.stages[COMMAND].command.words
    else:
        words = ("swapd", "run", str(found.path.absolute()))
    first, second = (
        msgspec.structs.replace(way.side, rounds=tuple(done))
        for way, done in zip(ways, rounds, strict=True)
    )
    made = Comparison(1, tuple(map(plain, words)), (first, second))
    if any(rounds):
        console.print(comparisons.table(made))
        comparisons.write(
            folder.name, ".json", msgspec.json.encode(made) + b"\n", "`swapd run --list` shows it"
        )
    if interrupted is None and found.path is None:
        _keep_better(folder.name, made, ways)
    return interrupted or made.status


def _ways(
    found: RunFile, folder: Path, options: ComparisonOptions, device_memory: int | None
) -> list[Variant]:
    load = None
    if found.path is None:
        load = _load(found.stages[COMMAND], options)
    else:
        _check_ends(found)
    ways = []
    for number, (side, changed) in enumerate(_sides(found, options.changes), 1):
        at = folder / f"side{number}"
        without = side.settings is None
        plan = _without(changed) if without else planned(changed, at, device_memory)
        ways.append(Variant(side, plan, load, at))
    return ways


# --- what is compared ----------------------------------------------------------------------


def _sides(found: RunFile, changes: Sequence[str]) -> list[tuple[Side, RunFile]]:
    if not changes:
        return [(Side(comparisons.WITHOUT, None), found), (Side(comparisons.WITH, {}), found)]
    changed = found._replace(daemons=tuple(one.changed(changes) for one in found.daemons))
    if changed.daemons == found.daemons:
        raise ConfigError(f"--set {' '.join(changes)}: both sides have that already: say another")
    sides = []
    for one in (found, changed):
        values = {name: one.daemons[0].value(name) for name in names_of(changes)}
        side = Side(" ".join(f"{name}={value}" for name, value in values.items()), values)
        sides.append((side, one))
    return sides


def _without(found: RunFile) -> RunPlan:
    said_to_all = {config.DISABLE_VARIABLE: "1"}
    if len(found.daemons) == 1:
        said_to_all[config.DEVICE_VARIABLE] = found.daemons[0].device or config.usual_device()
    stages = {}
    for name, stage in found.stages.items():
        stages[name] = stage._replace(environment={**said_to_all, **stage.environment})
        _refuse_need(stage, f"{found.path}: stages.{name}" if found.path else "")
    if found.path is None:
        devices = [table.device for table in found.daemons if table.device]
        stage = stages[COMMAND]
        shown = servers.on_devices(stage.command, devices, "-d")
        stages = {COMMAND: stage._replace(environment={**stage.environment, **shown})}
    return RunPlan(found._replace(stages=stages))


def _refuse_need(stage: StageSpec, source: str) -> None:
    if stage.ready == "registered":
        raise ConfigError(
            f'{source}.ready = "registered" would never come true without swapd: {_INSTEAD}, '
            'or say ready = "started"'
        )
    if said := servers.names_swapd(stage.command, stage.directory):
        of_stage = f"{source}.command: " if source else ""
        raise ConfigError(
            f"{of_stage}{said} needs swapd, so it cannot run without: leave it out, as `swapd "
            f"run` adds the needed options; or {_INSTEAD}"
        )


def _check_ends(found: RunFile) -> None:
    names = [name for name, stage in found.stages.items() if stage.command.kind != "other"]
    if names and not any(stage.ends_all for stage in found.stages.values()):
        raise ConfigError(
            f"{found.path}: {names[0]} is a server and does not end by itself: write a stage "
            "that uses it, with ends_all = true, whose end is that of all"
        )


def _load(stage: StageSpec, options: ComparisonOptions) -> ServerLoad | None:
    if options.until is not None and options.span is not None:
        raise ConfigError("give either --until COMMAND or --for SECONDS, not both")
    command = stage.command
    address = ready.parsed(options.ready) if options.ready else ready.of_server(command)
    if options.span is not None:
        return ServerLoad(("sleep", f"{options.span:f}"), False, address)
    if options.until is not None:
        words = _split(options.until)
        if address is None:
            raise ConfigError(
                "--until needs to know when the command is ready: give --ready, a port, HOST:PORT, "
                "http://HOST:PORT/PAGE or the path of a socket"
            )
        return ServerLoad(words, True, address)
    if command.kind != "other":
        raise ConfigError(
            "a server does not end by itself: give --until COMMAND, a client whose end ends the "
            "server, or --for SECONDS"
        )
    if options.ready:
        raise ConfigError("--ready is for --until and --for")
    return None


def _split(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as exc:
        raise ConfigError(f"--until {command}: {exc}") from exc
    if not words:
        raise ConfigError("--until: give a command")
    return words


def _check_alone(ways: Sequence[Variant]) -> None:
    if (load := ways[0].load) is not None and load.address is not None:
        _check_free(load.address)
    for way in ways:
        for wanted in way.plan.daemons:
            if there := joinable(wanted._replace(budget=0)):
                raise SwapdError(
                    f"a swapd serves {wanted.device} at {there.folder}, and would be measured too: "
                    f"end it first, with `swapd stop --endpoint {there.folder}`"
                )


def _check_free(address: ServerAddress) -> None:
    if ready.listens(address):
        raise SwapdError(
            f"{address} answers already, and would be taken for the command: end it first"
        )


# --- run -----------------------------------------------------------------------------------


def _all_rounds(
    ways: Sequence[Variant], count: int
) -> tuple[tuple[list[Round], list[Round]], int | None]:
    """Return the rounds of each side, and the exit status if a signal ended them. The sides
    alternate, so that a change of the machine affects both. A round with a failure is the last."""
    rounds: tuple[list[Round], list[Round]] = ([], [])
    devices = [wanted.device for wanted in ways[1].plan.daemons]
    for number in range(1, count + 1):
        of = f", round {number} of {count}" if count > 1 else ""
        for n, (way, done) in enumerate(zip(ways, rounds, strict=True), 1):
            note(f"{n} of 2: {way.side.name}{of}")
            found = _round(way, devices)
            if found.signal is not None:
                return rounds, found.status or SIGNALLED + found.signal
            done.append(found)
            if found.status:
                why = f": {found.why}" * bool(found.why)
                say_error(f"{way.side.name}: failed with status {found.status}{why}")
        if any(done[-1].status for done in rounds):
            break
    return rounds, None


def _round(way: Variant, devices: Sequence[str]) -> Round:
    try:
        with serving(way.plan.daemons, way.folder) as daemons:
            since = time.monotonic()
            found = _measured(way, daemons, Sampler(devices))
            logs = logs_since(daemons, since)
        outcomes = tuple(outcome.of_device(records, since) for records in logs)
        return msgspec.structs.replace(found, outcomes=outcomes)
    except SpawnError as exc:  # the figures of the other side are kept
        return Round(1, why=f"no daemon was started: {exc}")
    except CannotRun:
        raise
    except SwapdError as exc:
        return Round(1, why=str(exc))


def _measured(way: Variant, daemons: Sequence[ServingDaemon], sampler: Sampler) -> Round:
    began = time.monotonic()
    with repeated(sampler.sample, lambda: sampler.pause_s):
        if way.load is not None:
            with _to_itself(way.load.address):
                found = _server_with_load(way, way.load, daemons)
        elif way.plan.file.path is not None:
            status, runner = run_stages(way.plan.file, daemons, way.folder)
            ends = [one.took_s for one in runner.stages.states.values() if one.stage.ends_all]
            load_s = ends[0] if len(ends) == 1 else None
            found = Round(status, load_s=load_s, signal=runner.signal)
        else:
            stage = way.plan.file.stages[COMMAND]
            environment = {**environment_on(daemons), **stage.environment}
            status, signal = child.run(stage.command.words, environment)
            found = Round(status, signal=signal)
    return msgspec.structs.replace(
        found,
        whole_s=time.monotonic() - began,
        host_bytes=sampler.host_bytes,
        device_bytes=sampler.device_bytes,
    )


def _server_with_load(way: Variant, load: ServerLoad, daemons: Sequence[ServingDaemon]) -> Round:
    server = way.plan.file.stages[COMMAND]._replace(
        name="server",
        ready="started" if load.address is None else "answers",
        ends_all=True,
        stop_timeout_s=_ENDS_IN_S,
    )
    uses = StageSpec("load", command_of(load.words), {}, server.directory)
    uses = uses._replace(after=("server",), ends_all=True)
    file = way.plan.file._replace(stages={"server": server, "load": uses})
    status, runner = run_stages(file, daemons, way.folder, load.address)
    states = runner.stages.states
    why, killed = "", states["server"].status == SIGNALLED + 9
    if runner.signal is None and runner.stages.ended_by == "server":
        status, why = status or 1, "it ended by itself, before it was told to"
    elif status:
        why = f"{load.words[0]} ended with status {status}"
    elif killed and runner.signal is None:
        status = SIGNALLED + 9
        why = f"it did not end within {_ENDS_IN_S:.0f} s of SIGTERM, and was killed"
    return Round(
        status,
        ready_s=states["server"].ready_s if load.address else None,
        load_s=states["load"].took_s if load.counts else None,
        why=why,
        signal=runner.signal,
    )


@contextmanager
def _to_itself(address: ServerAddress | None) -> Iterator[None]:
    """Take the server's address. Afterwards, remove a socket file that the server left, as the next
    server could not listen there. Raises: SwapdError if another server answers."""
    if address is None:
        yield
        return
    _check_free(address)
    socket = Path(address.path) if address.path else None
    ours = socket is not None and not socket.exists()
    yield
    if socket is not None and ours and socket.is_socket() and not ready.listens(address):
        socket.unlink(missing_ok=True)


def _keep_better(name: str, found: Comparison, ways: Sequence[Variant]) -> None:
    if (good := comparisons.better(found)) is None:
        return
    side, why = good
    plan = ways[found.sides.index(side)].plan
    settings = plan.file.daemons[0]
    budgets = {wanted.budget for wanted in plan.daemons}
    if settings.budget is None and len(budgets) == 1:  # in whole MiB, as people would type it
        settings = settings._replace(budget=-(-budgets.pop() // _MIB) * _MIB)
    text = f"# {why}: {shlex.join(found.command)}\n{settings.as_toml()}"
    about = f"the better settings ({why}), for `swapd run --config`"
    comparisons.write(name, ".toml", text.encode(errors="replace"), about)
