"""`swapd run FILE.toml`: the daemons that the stages share, and the stages as they are started.

Servers of vLLM-Omni that share GPUs are planned together, with the servers of plain vLLM there.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swapd.cli.plan_vllm import Together, reports_of
from swapd.cli.run_plan import (
    OmniServer,
    deploy_of,
    isolation_in,
    omni_server,
    on_host,
    planned_daemon,
    say_not_planned,
)
from swapd.plan import workspace
from swapd.plan.advise import PlanError
from swapd.plan.claims import Server
from swapd.plan.deploy import Deploy
from swapd.run import budgets, gpus, plans
from swapd.run.commands import DEPLOY_CONFIG, Command, component_of, option, shards_of
from swapd.run.daemons import Wanted
from swapd.run.several.file import OF_ONE, DaemonTable, RunFile, Stage
from swapd.shared import config
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, gpus_in
from swapd.shared.units import parse_size

_UTILIZATION = "--gpu-memory-utilization"
_EAGER = "--enforce-eager"
_KV_CACHE = "--kv-cache-memory-bytes"


#: The setting for the name of a component, by the kind of command.
_NAMED_BY = {
    "vllm": """--additional-config '{"swapd": {"component": "NAME"}}'""",
    "vllm-omni": "additional_config: {swapd: {component: NAME}} in its deploy file",
}


class FilePlan(NamedTuple):
    """All that `swapd run FILE.toml` is about to do."""

    #: With its commands as they are started.
    file: RunFile
    daemons: list[Wanted]
    #: Files to write, by their paths.
    files: dict[Path, str]


def planned_file(found: RunFile, folder: Path, device_memory: str | None) -> FilePlan:
    """Plan all stages; nothing is written. `folder`: of the run. Raises: PlanError, with the sum;
    ConfigError."""
    gpus.check(_devices(found), f"{found.path}: daemon.device")
    omni = [stage for stage in found.stages.values() if stage.command.kind == "vllm-omni"]
    if not omni or on_host([table.device or "" for table in found.daemons]):
        read = {stage.name: deploy_of(_seen_from_here(stage)) for stage in omni}
        if omni:
            say_not_planned(read.values())
        _check_names(found, read)
        daemons = [one for table in found.daemons for one in _usual(table, found)]
        return FilePlan(_with(found, {}, daemons), daemons, {})
    for stage in omni:
        if VISIBLE_VARIABLE in stage.environment:
            raise ConfigError(
                f"{found.path}: stages.{stage.name}.env.{VISIBLE_VARIABLE}: the GPUs of a server "
                "of vLLM-Omni are the devices of its deploy file: write them there, or set the "
                "variable for `swapd run`"
            )
    servers = {
        stage.name: omni_server(
            stage.command,
            folder / f"{stage.name}.yaml",
            _devices(found),
            _seen_from_here(stage),
        )
        for stage in omni
    }
    _check_names(found, {name: server.found for name, server in servers.items()})
    plan = _together(found, servers, device_memory)
    daemons = _daemons(found, plan)
    overlays = {s.overlay: r.overlay for s, r in zip(servers.values(), plan.reports, strict=True)}
    return FilePlan(_with(found, servers, daemons), daemons, overlays)


def _check_names(found: RunFile, read: Mapping[str, Deploy | None]) -> None:
    """Check that no two stages have components of one name in one daemon at the same time.

    `read`: the deploy files of servers of vLLM-Omni, as far as they are known. Raises: PlanError.
    """
    seen: dict[tuple[str, str], list[Stage]] = {}
    for stage in found.stages.values():
        for key in dict.fromkeys(_components(stage, found, read.get(stage.name))):
            for other in seen.get(key, ()):
                if not (_ends_before(other, stage, found) or _ends_before(stage, other, found)):
                    raise PlanError(
                        f"{found.path}: stages.{other.name} and stages.{stage.name} would both "
                        f"have a component called {key[0]} on {key[1]}, and its daemon has one of "
                        f"each name: give one of them another name, by "
                        f"{_NAMED_BY[stage.command.kind]}, or another device"
                    )
            seen.setdefault(key, []).append(stage)


def _components(stage: Stage, found: RunFile, read: Deploy | None) -> Iterator[tuple[str, str]]:
    """The components that a stage's processes have, each with the device of its daemon."""
    host = on_host([table.device or budgets.devices()[0] for table in found.daemons])
    stages = [one for one in read.stages if one.has_components] if read else []
    named = [(one.name, one.shards, one.gpus) for one in stages]
    if stage.command.kind == "vllm":
        on = () if host else _gpus(stage, found)
        named = [(component_of(stage.command), shards_of(stage.command), on)]
    for name, shards, on in named:
        for device in ["host"] if host else [f"cuda:{gpu}" for gpu in on]:
            yield f"{name}.tp0" if shards > 1 else name, device


def _ends_before(first: Stage, then: Stage, found: RunFile) -> bool:
    """Whether `then` starts only after `first` has ended."""
    before = [found.stages[name] for name in then.after]
    return first.ready == "ended" and any(
        one is first or _ends_before(first, one, found) for one in before
    )


def _with(found: RunFile, servers: Mapping[str, OmniServer], daemons: Sequence[Wanted]) -> RunFile:
    """With each command as it is started."""
    stages = {}
    for name, stage in found.stages.items():
        if name in servers:
            stages[name] = stage._replace(command=servers[name].planned)
            continue
        shown = {} if VISIBLE_VARIABLE in stage.environment else _shown(stage, found)
        stages[name] = stage._replace(
            command=plans.with_worker(stage.command, daemons),
            environment={**shown, **stage.environment},
        )
    return found._replace(stages=stages)


def _devices(found: RunFile) -> list[str]:
    """The GPUs of daemons, as the file says them."""
    return [t.device for t in found.daemons if t.device not in (None, "host")]


def _shown(stage: Stage, found: RunFile) -> dict[str, str]:
    on = _devices(found) or [table.device for table in found.daemons if table.device]
    return plans.on_devices(stage.command, on, f"[daemon] of {found.path}")


def _seen_from_here(stage: Stage) -> Command:
    """Its command with the program and the files that it names as this process finds them."""
    command, folder = stage.command, stage.directory
    program = command.words[0]
    at = str(folder / program) if "/" in program else program
    words = [shutil.which(at, path=stage.environment.get("PATH")) or at, *command.words[1:]]
    named = [command.model, option(command.words, DEPLOY_CONFIG)]
    for name in [name for name in named if name and (folder / name).exists()]:
        there = str(folder / name)
        words = [there if w == name else w.replace(f"={name}", f"={there}") for w in words]
    return command._replace(words=tuple(words))


# --- planned together ----------------------------------------------------------------------


def _together(
    found: RunFile, servers: Mapping[str, OmniServer], device_memory: str | None
) -> Together:
    beside = [stage for stage in found.stages.values() if stage.command.kind == "vllm"]
    flags = [table.flags for table in found.daemons]
    chunks = {one["chunk"] for one in flags if "chunk" in one}
    if len(chunks) > 1:
        raise ConfigError(
            f"{found.path}: daemon: the stages of vLLM-Omni are planned in chunks of one size: say "
            f"one chunk, not {' and '.join(sorted(chunks))}"
        )
    every = {gpu for server in servers.values() for s in server.found.stages for gpu in s.gpus}
    given = {gpu: table.budget for gpu in every if (table := _table_of(found, gpu)) is not None}
    return reports_of(
        [server.asked for server in servers.values()],
        servers=lambda totals: [_server(stage, found, totals) for stage in beside],
        on={gpu for stage in beside for gpu in _gpus(stage, found)},
        budgets={gpu: budget for gpu, budget in given.items() if budget is not None},
        device_memory=device_memory,
        chunk=next(iter(chunks), None),
        isolation=isolation_in([pair for one in flags for pair in one.items()]),
    )


def _server(stage: Stage, found: RunFile, totals: Mapping[int, int]) -> Server:
    """A server of plain vLLM beside those of vLLM-Omni: it has to say what it takes."""
    on, words = _gpus(stage, found), stage.command.words
    weights = budgets.weights_of(_seen_from_here(stage))
    if weights is None:
        raise PlanError(f"{stage.name}: say which model: its command has none after serve")
    try:
        if (said := option(words, _KV_CACHE)) is not None:
            room = int(parse_size(said)) + workspace.USUAL_BYTES["ar"]
        elif (said := option(words, _UTILIZATION)) is not None:
            room = round(float(said) * min(totals[gpu] for gpu in on))
        else:
            raise PlanError(
                f"{stage.name} shares GPU {on[0]} with stages of vLLM-Omni, and would take 92% "
                f"of it for its KV cache: say {_UTILIZATION} or {_KV_CACHE} in its command"
            )
    except ValueError as exc:
        raise PlanError(f"{stage.name}: {_KV_CACHE} or {_UTILIZATION}: {exc}") from exc
    return Server(component_of(stage.command), on, weights, room, _EAGER not in words)


def _gpus(stage: Stage, found: RunFile) -> tuple[int, ...]:
    """Those of a server of plain vLLM, by their numbers here. Raises: ConfigError if there is no
    daemon for one that the stage is shown."""
    needed, said = shards_of(stage.command), stage.environment.get(VISIBLE_VARIABLE)
    devices = _devices(found) or [f"cuda:{number}" for number in range(gpus.count() or needed)]
    numbers = [number for one in devices if (number := gpus.number_of(one)) is not None]
    if said is None:
        return tuple(numbers[:needed])
    names = gpus_in(said)[:needed]
    here = {n: gpus.name_of(f"cuda:{n}", config.listed_gpus()) for n in numbers}
    of = [[n for n, name in here.items() if gpus.same(name, one)] for one in names]
    if len(of) < needed or not all(of):
        known = ", ".join(f"cuda:{n} (GPU {name})" for n, name in here.items())
        raise ConfigError(
            f"{found.path}: stages.{stage.name}.env.{VISIBLE_VARIABLE} = {said}: the stage needs "
            f"{needed} GPU{'s' if needed > 1 else ''} of the daemons, which are on {known}: list "
            f"{'these' if needed > 1 else 'one of these'}, or leave it out"
        )
    return tuple(numbers_of[0] for numbers_of in of)


# --- daemons -------------------------------------------------------------------------------


def _daemons(found: RunFile, plan: Together) -> list[Wanted]:
    """One for each GPU that is planned, with the settings of its table, and those of the others."""
    served = [gpu for gpu in plan.gpus if gpu.budget_bytes]
    if len(served) > 1 and (only := _for_all(found)) and (of_one := OF_ONE & only.flags.keys()):
        raise ConfigError(
            f"{found.path}: daemon.{min(of_one)}: the stages are on several GPUs, and a file with "
            "one daemon alone may set it: leave it out, or write [[daemon]] for each GPU"
        )
    daemons, tables = [], set()
    for gpu in served:
        table = _table_of(found, gpu.gpu)
        assert table is not None  # stages are on devices of tables only
        tables.add(id(table))
        one = planned_daemon(gpu, table.budget, f"budget of {found.path}")
        daemons.append(one._replace(others=tuple(table.flags.items()), file=found.path))
    others = [table for table in found.daemons if id(table) not in tables]
    return daemons + [one for table in others for one in _usual(table, found)]


def _for_all(found: RunFile) -> DaemonTable | None:
    """The table without a device, which is that of each daemon."""
    return next((table for table in found.daemons if table.device is None), None)


def _table_of(found: RunFile, gpu: int) -> DaemonTable | None:
    """The table of the daemon that serves this GPU, if one does."""
    names = (f"cuda:{gpu}", *(("cuda",) if gpu == 0 else ()))
    named = (table for table in found.daemons if table.device in names)
    return next(named, _for_all(found))


def _usual(table: DaemonTable, found: RunFile) -> list[Wanted]:
    """The daemons of a table without planned stages: one for each device.

    Raises: PlanError, if the free memory is unknown.
    """
    commands = [
        _seen_from_here(stage)
        for stage in found.stages.values()
        if stage.command.kind != "vllm"
        or table.device == "host"
        or table in [_table_of(found, gpu) for gpu in _gpus(stage, found)]
    ]
    devices = [] if table.device is None else [table.device]
    why = None if table.budget is None else f"budget of {found.path}"
    return [
        one._replace(why=why or one.why, others=tuple(table.flags.items()), file=found.path)
        for one in budgets.wanted(commands, devices, table.budget)
    ]
