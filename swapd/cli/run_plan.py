"""The plan of `swapd run`: the daemons that its stages share, and the stages as they are started.

A single command is a file with one stage. Servers of vLLM-Omni that share GPUs are planned
together, with the servers of plain vLLM there.
"""

import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from swapd.cli.common import console, errors
from swapd.cli.plan_vllm import JointPlan, PlanOptions, StageFile, reports_of
from swapd.plan import deploy, workspace
from swapd.plan.advise import PlanError
from swapd.plan.claims import PlainServer
from swapd.plan.deploy import Deploy
from swapd.run import budgets, gpus, servers
from swapd.run.commands import DEPLOY_CONFIG, Command, component_of, option, shards_of
from swapd.run.daemons import DaemonSpec, joinable
from swapd.run.file import OF_ONE, RunFile, StageSpec
from swapd.run.settings import DaemonTable
from swapd.shared import config
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, gpus_in
from swapd.shared.text import plain
from swapd.shared.units import parse_size, size

_UTILIZATION = "--gpu-memory-utilization"
_EAGER = "--enforce-eager"
_KV_CACHE = "--kv-cache-memory-bytes"

#: The setting for the name of a component, by the kind of command.
_NAMED_BY = {
    "vllm": """--additional-config '{"swapd": {"component": "NAME"}}'""",
    "vllm-omni": "additional_config: {swapd: {component: NAME}} in its deploy file",
}


class RunPlan(NamedTuple):
    """All that `swapd run` is about to do."""

    #: With its commands as they are started.
    file: RunFile
    daemons: Sequence[DaemonSpec] = ()
    #: Files to write, by their paths.
    files: Mapping[Path, str] = {}

    def show(self) -> None:
        """Print the command lines of daemons and stages, and the files with their texts."""
        for one in self.daemons:
            there = joinable(one)
            what = f"joins the one at {there}" if there else one.line
            console.print(plain(f"{what}    # {size(one.budget)}: {one.why}"), soft_wrap=True)
        for path, text in self.files.items():
            console.print(plain(f"# {path}"), style="dim", soft_wrap=True)
            typer.echo(text, nl=False)
        for stage in self.file.stages.values():
            of_file = f"    # {_about(stage)}" if self.file.path else ""
            folder = f"cd {shlex.quote(str(stage.directory))} && " if self.file.path else ""
            console.print(plain(f"{folder}{_line(stage)}{of_file}"), soft_wrap=True)

    def write(self) -> None:
        """Write the files. Raises: OSError."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _line(stage: StageSpec) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in stage.environment.items()]
    return " ".join([*variables, shlex.join(stage.command.words)])


def _about(stage: StageSpec) -> str:
    after = f", after {', '.join(stage.after)}" if stage.after else ""
    retries = f" {stage.retries} times" if stage.retries is not None else ""
    restart = "" if stage.restart == "no" else f", restart {stage.restart}{retries}"
    ready = "" if stage.ready == "started" else f", ready when {stage.ready}"
    return f"{stage.name}{after}{restart}{ready}"


def planned(found: RunFile, folder: Path, device_memory: str | None) -> RunPlan:
    """Plan all stages; nothing is written. `folder`: of the run. Raises: PlanError, with the sum;
    ConfigError."""
    gpus.check(_devices(found), f"{found.path}: daemon.device" if found.path else "-d")
    omni = [stage for stage in found.stages.values() if stage.command.kind == "vllm-omni"]
    if not omni or _on_host([table.device or "" for table in found.daemons]):
        read = {stage.name: _deploy_of(_seen_from_here(stage)) for stage in omni}
        if omni:
            _say_not_planned(read.values())
        _check_names(found, read)
        daemons = [one for table in found.daemons for one in _usual(table, found)]
        return RunPlan(_with(found, daemons, folder, ()), daemons)
    for stage in omni:
        if VISIBLE_VARIABLE in stage.environment:
            raise ConfigError(
                f"{found.path}: stages.{stage.name}.env.{VISIBLE_VARIABLE}: the GPUs of a server "
                "of vLLM-Omni are the devices of its deploy file: write them there, or set the "
                "variable for `swapd run`"
            )
    deployed = {
        stage.name: _deployed(stage, folder / f"{stage.name}.yaml", _devices(found))
        for stage in omni
    }
    _check_names(found, deployed)
    plan = _together(found, deployed, device_memory)
    daemons = _daemons(found, plan)
    overlays = {
        folder / f"{name}.yaml": report.overlay
        for name, report in zip(deployed, plan.reports, strict=True)
    }
    return RunPlan(_with(found, daemons, folder, deployed), daemons, overlays)


def _with(
    found: RunFile, daemons: Sequence[DaemonSpec], folder: Path, planned: Collection[str]
) -> RunFile:
    """With each command as it is started. `planned`: stages that get an overlay in `folder`."""
    stages = {}
    for name, stage in found.stages.items():
        if name in planned:
            command = stage.command.with_option(DEPLOY_CONFIG, str(folder / f"{name}.yaml"))
            stages[name] = stage._replace(command=command)
            continue
        shown = {} if VISIBLE_VARIABLE in stage.environment else _shown(stage, found)
        stages[name] = stage._replace(
            command=servers.with_worker(stage.command, daemons),
            environment={**shown, **stage.environment},
        )
    return found._replace(stages=stages)


def _shown(stage: StageSpec, found: RunFile) -> dict[str, str]:
    on = _devices(found) or [table.device for table in found.daemons if table.device]
    source = f"[daemon] of {found.path}" if found.path else "-d"
    return servers.on_devices(stage.command, on, source)


def _seen_from_here(stage: StageSpec) -> Command:
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


# --- names of components -------------------------------------------------------------------


def _check_names(found: RunFile, read: Mapping[str, Deploy | None]) -> None:
    """Check that no two stages have components of one name in one daemon at the same time.

    `read`: the deploy files of servers of vLLM-Omni, as far as they are known. Raises: PlanError.
    """
    seen: dict[tuple[str, str], list[StageSpec]] = {}
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


def _components(stage: StageSpec, found: RunFile, read: Deploy | None) -> Iterator[tuple[str, str]]:
    """The components that a stage's processes have, each with the device of its daemon."""
    host = _on_host([table.device or budgets.devices()[0] for table in found.daemons])
    stages = [one for one in read.stages if one.has_components] if read else []
    named = [(one.name, one.shards, one.gpus) for one in stages]
    if stage.command.kind == "vllm":
        on = () if host else _gpus(stage, found)
        named = [(component_of(stage.command), shards_of(stage.command), on)]
    for name, shards, on in named:
        for device in ["host"] if host else [f"cuda:{gpu}" for gpu in on]:
            yield f"{name}.tp0" if shards > 1 else name, device


def _ends_before(first: StageSpec, then: StageSpec, found: RunFile) -> bool:
    """Whether `then` starts only after `first` has ended."""
    before = [found.stages[name] for name in then.after]
    return first.ready == "ended" and any(
        one is first or _ends_before(first, one, found) for one in before
    )


# --- GPUs ----------------------------------------------------------------------------------


def _devices(found: RunFile) -> list[str]:
    """The GPUs of daemons, as the file or the options say them."""
    return [t.device for t in found.daemons if t.device not in (None, "host")]


def _on_host(devices: Collection[str]) -> bool:
    """Whether all devices are the host, for which vLLM-Omni cannot be planned."""
    return set(devices) == {"host"}


def _gpus(stage: StageSpec, found: RunFile) -> tuple[int, ...]:
    """Those of a server of plain vLLM, by their numbers here. Raises: ConfigError if there is no
    daemon for one that the stage is shown."""
    needed, said = shards_of(stage.command), stage.environment.get(VISIBLE_VARIABLE)
    usual = [f"cuda:{number}" for number in range(gpus.count() or needed)]
    numbers = gpus.numbers_of(_devices(found) or usual)
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


# --- servers of vLLM-Omni, planned together ------------------------------------------------


def _say_not_planned(read: Collection[Deploy | None]) -> None:
    """Say that servers of vLLM-Omni run as they are; `read`: their deploy files, None: unknown."""
    said = "swapd: vllm-omni runs with its own settings, since swapd plans it for GPUs only"
    if not all(one and any(s.has_components for s in one.stages) for one in read):
        said += ": have its --deploy-config name swapd's workers"
    errors.print(said, soft_wrap=True)


def _deploy_of(command: Command) -> Deploy | None:
    """The deploy file of a server as it is; None if it is unknown."""
    if command.model is None:
        return None
    try:
        file = servers.deploy_file_of(command)
        return deploy.read(file.path, installed=file.installed)
    except PlanError:
        return None  # vllm-omni says so


def _deployed(stage: StageSpec, overlay: Path, devices: Sequence[str]) -> Deploy:
    """The deploy file of a server, with swapd's workers in all stages. Says what it changes.

    `overlay`: the path of the file that the server is to get. Raises: PlanError.
    """
    seen = _seen_from_here(stage)
    if seen.model is None:
        raise PlanError(f"the model is missing after serve: {shlex.join(stage.command.words)}")
    file = servers.deploy_file_of(seen)
    said = [f"the deploy file is {file.path}: {file.why}"] if file.why else []
    own, moved = servers.with_workers(file, gpus.numbers_of(devices or budgets.devices()))
    for each in [*said, *moved]:
        errors.print(plain(f"swapd: {each}"), soft_wrap=True)
    path = file.path if own is None else overlay
    found = deploy.read(path, own, file.installed)
    servers.check_placed(file.path, found.stages, devices)
    return found


def _together(
    found: RunFile, deployed: Mapping[str, Deploy], device_memory: str | None
) -> JointPlan:
    beside = [stage for stage in found.stages.values() if stage.command.kind == "vllm"]
    flags = [table.flags for table in found.daemons]
    chunks = {one["chunk"] for one in flags if "chunk" in one}
    if len(chunks) > 1:
        raise ConfigError(
            f"{found.path}: daemon: the stages of vLLM-Omni are planned in chunks of one size: say "
            f"one chunk, not {' and '.join(sorted(chunks))}"
        )
    every = {gpu for one in deployed.values() for s in one.stages for gpu in s.gpus}
    given = {gpu: table.budget for gpu in every if (table := _table_of(found, gpu)) is not None}
    models = [servers.model_folder(_seen_from_here(found.stages[name])) for name in deployed]
    strict = "strict" in [one.get("isolation") for one in flags]
    options = PlanOptions(
        device_memory,
        chunk=next(iter(chunks), None),
        isolation="strict" if strict else "relaxed",
    )
    return reports_of(
        [
            StageFile(one, [str(model)])
            for one, model in zip(deployed.values(), models, strict=True)
        ],
        options,
        servers=lambda totals: [_server(stage, found, totals) for stage in beside],
        on={gpu for stage in beside for gpu in _gpus(stage, found)},
        budgets={gpu: budget for gpu, budget in given.items() if budget is not None},
    )


def _server(stage: StageSpec, found: RunFile, totals: Mapping[int, int]) -> PlainServer:
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
    return PlainServer(component_of(stage.command), on, weights, room, _EAGER not in words)


# --- daemons -------------------------------------------------------------------------------


def _daemons(found: RunFile, plan: JointPlan) -> list[DaemonSpec]:
    """One for each GPU that is planned, with the settings of its table; and for a file, those of
    its other tables."""
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
        tables.add(table.device)
        one = DaemonSpec(
            f"cuda:{gpu.gpu}", gpu.budget_bytes, "the budget in the plan", gpu.chunk_bytes
        )
        daemons.append(_of_table(one, table, found))
    others = [table for table in found.daemons if found.path and table.device not in tables]
    return daemons + [one for table in others for one in _usual(table, found)]


def _of_table(wanted: DaemonSpec, table: DaemonTable, found: RunFile) -> DaemonSpec:
    """A daemon with the settings of its table, and the table's budget if it has one."""
    others = tuple(table.flags.items())
    if table.budget is None:
        return wanted._replace(others=others, file=found.path)
    why = f"budget of {found.path}" if found.path else "--budget"
    return wanted._replace(budget=table.budget, why=why, others=others, file=found.path)


def _for_all(found: RunFile) -> DaemonTable | None:
    """The table without a device, which is that of each daemon."""
    return next((table for table in found.daemons if table.device is None), None)


def _table_of(found: RunFile, gpu: int) -> DaemonTable | None:
    """The table of the daemon that serves this GPU, if one does."""
    names = (f"cuda:{gpu}", *(("cuda",) if gpu == 0 else ()))
    named = (table for table in found.daemons if table.device in names)
    return next(named, _for_all(found))


def _usual(table: DaemonTable, found: RunFile) -> list[DaemonSpec]:
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
    wanted = budgets.wanted(commands, devices, table.budget)
    return [_of_table(one, table, found) for one in wanted]
