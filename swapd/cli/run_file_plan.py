"""`swapd run FILE.toml`: the daemons that the stages share, and the stages as they are started.

Servers of vLLM-Omni that share GPUs are planned together, with the servers of plain vLLM there.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swapd.cli.plan_vllm import Together, reports_of
from swapd.cli.run_plan import OmniServer, isolation_in, omni_server, on_host, planned_daemon
from swapd.plan import workspace
from swapd.plan.advise import PlanError
from swapd.plan.claims import Server
from swapd.run import budgets, plans
from swapd.run.commands import DEPLOY_CONFIG, Command, component_of, option, shards_of
from swapd.run.daemons import Wanted
from swapd.run.several.file import OF_ONE, DaemonTable, RunFile, Stage
from swapd.shared.config import ConfigError
from swapd.shared.units import parse_size

_UTILIZATION = "--gpu-memory-utilization"
_EAGER = "--enforce-eager"
_KV_CACHE = "--kv-cache-memory-bytes"


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
    omni = [stage for stage in found.stages.values() if stage.command.kind == "vllm-omni"]
    if not omni or on_host([table.device or "" for table in found.daemons]):
        daemons = [_usual(table, found) for table in found.daemons]
        return FilePlan(_with(found, {}, daemons), daemons, {})
    devices = [t.device for t in found.daemons if t.device not in (None, "host")]
    servers = {
        stage.name: omni_server(
            stage.command,
            folder / f"{stage.name}.yaml",
            [device for device in devices if device] or budgets.devices(),
            _seen_from_here(stage),
        )
        for stage in omni
    }
    plan = _together(found, servers, device_memory)
    daemons = _daemons(found, plan)
    overlays = {s.overlay: r.overlay for s, r in zip(servers.values(), plan.reports, strict=True)}
    return FilePlan(_with(found, servers, daemons), daemons, overlays)


def _with(found: RunFile, servers: Mapping[str, OmniServer], daemons: Sequence[Wanted]) -> RunFile:
    """With each command as it is started."""
    stages = {
        name: stage._replace(
            command=servers[name].planned
            if name in servers
            else plans.with_worker(stage.command, daemons)
        )
        for name, stage in found.stages.items()
    }
    return found._replace(stages=stages)


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
        servers=lambda totals: [_server(stage, totals) for stage in beside],
        on={gpu for stage in beside for gpu in _gpus(stage)},
        budgets={gpu: budget for gpu, budget in given.items() if budget is not None},
        device_memory=device_memory,
        chunk=next(iter(chunks), None),
        isolation=isolation_in([pair for one in flags for pair in one.items()]),
    )


def _server(stage: Stage, totals: Mapping[int, int]) -> Server:
    """A server of plain vLLM beside those of vLLM-Omni: it has to say what it takes."""
    gpus, words = _gpus(stage), stage.command.words
    weights = budgets.weights_of(_seen_from_here(stage))
    if weights is None:
        raise PlanError(
            f"{stage.name}: how large its weights are is not known, since {stage.command.model} is "
            "no folder: name the model's folder"
        )
    try:
        if (said := option(words, _KV_CACHE)) is not None:
            room = int(parse_size(said)) + workspace.USUAL_BYTES["ar"]
        elif (said := option(words, _UTILIZATION)) is not None:
            room = round(float(said) * min(totals[gpu] for gpu in gpus))
        else:
            raise PlanError(
                f"{stage.name} shares GPU {gpus[0]} with stages of vLLM-Omni, and would take 92% "
                f"of it for its KV cache: say {_UTILIZATION} or {_KV_CACHE} in its command"
            )
    except ValueError as exc:
        raise PlanError(f"{stage.name}: {_KV_CACHE} or {_UTILIZATION}: {exc}") from exc
    return Server(component_of(stage.command), gpus, weights, room, _EAGER not in words)


def _gpus(stage: Stage) -> tuple[int, ...]:
    """Those of a server of plain vLLM, as it counts them."""
    return tuple(range(shards_of(stage.command)))


# --- daemons -------------------------------------------------------------------------------


def _daemons(found: RunFile, plan: Together) -> list[Wanted]:
    """One for each GPU that is planned, with the settings of its table, and those of the others."""
    gpus = [gpu for gpu in plan.gpus if gpu.budget_bytes]
    if len(gpus) > 1 and (only := _for_all(found)) and (of_one := OF_ONE & only.flags.keys()):
        raise ConfigError(
            f"{found.path}: daemon.{min(of_one)}: the stages are on several GPUs, and a file with "
            "one daemon alone may set it: leave it out, or write [[daemon]] for each GPU"
        )
    daemons, tables = [], set()
    for gpu in gpus:
        table = _table_of(found, gpu.gpu)
        assert table is not None  # stages are on devices of tables only
        tables.add(id(table))
        one = planned_daemon(gpu, table.budget, f"budget of {found.path}")
        daemons.append(one._replace(others=tuple(table.flags.items()), file=found.path))
    return daemons + [_usual(table, found) for table in found.daemons if id(table) not in tables]


def _for_all(found: RunFile) -> DaemonTable | None:
    """The table without a device, which is that of each daemon."""
    return next((table for table in found.daemons if table.device is None), None)


def _table_of(found: RunFile, gpu: int) -> DaemonTable | None:
    """The table of the daemon that serves this GPU, if one does."""
    names = (f"cuda:{gpu}", *(("cuda",) if gpu == 0 else ()))
    named = (table for table in found.daemons if table.device in names)
    return next(named, _for_all(found))


def _usual(table: DaemonTable, found: RunFile) -> Wanted:
    """A daemon whose stages are not planned. Raises: PlanError, if the free memory is unknown."""
    commands = [
        _seen_from_here(stage)
        for stage in found.stages.values()
        if stage.command.kind != "vllm"
        or table.device == "host"
        or table in [_table_of(found, gpu) for gpu in _gpus(stage)]
    ]
    devices = [] if table.device is None else [table.device]
    (wanted,) = budgets.wanted(commands, devices, table.budget)
    why = f"budget of {found.path}" if table.budget is not None else wanted.why
    return wanted._replace(why=why, others=tuple(table.flags.items()), file=found.path)
