"""The plan of `swapd run`: the daemons that its stages share, and the stages as they are started.

A single command is a file with one stage. Servers of vLLM-Omni that share GPUs are planned
together, and with the servers of plain vLLM there.
"""

import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from swapd.cli.common import errors, note, say
from swapd.cli.plan_page import streaming
from swapd.cli.plan_vllm import JointPlan, PlanOptions, StageFile, reports_of, without_graphs
from swapd.cli.run_components import check_names, devices_of, gpus_of, on_host
from swapd.plan import claims, deploy, kv, offload_flags, sizes
from swapd.plan.advice import DoesNotFit, PlanError
from swapd.plan.chunks import Isolation
from swapd.plan.claims import PlainServer
from swapd.plan.deploy import Deploy
from swapd.run import budgets, gpus, servers
from swapd.run.commands import DEPLOY_CONFIG, Command, component_of, number_of, option
from swapd.run.daemons import DaemonSpec, joinable
from swapd.run.file import OF_ONE, DaemonTable, RunFile, StageSpec
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, gpu_number
from swapd.shared.units import size

_UTILIZATION = "--gpu-memory-utilization"
_EAGER = "--enforce-eager"
_KV_CACHE = "--kv-cache-memory-bytes"
_BY_LAYER, _BY_MODEL = "--enable-layerwise-offload", "--enable-cpu-offload"


class RunPlan(NamedTuple):
    file: RunFile
    daemons: Sequence[DaemonSpec] = ()
    files: Mapping[Path, str] = {}

    def show(self) -> None:
        for one in self.daemons:
            if there := joinable(one):
                say(f"joins the one at {there.folder}    # {size(there.budget)}: its own budget")
            else:
                line = shlex.join(["swapd", *one.command[3:]])
                say(f"{line}    # {size(one.budget)}: {one.why}")
        for path, text in self.files.items():
            say(f"# {path}", "dim")
            typer.echo(text, nl=False)
        for stage in self.file.stages.values():
            of_file = f"    # {_about(stage)}" if self.file.path else ""
            folder = f"cd {shlex.quote(str(stage.directory))} && " if self.file.path else ""
            set_ = [f"{name}={shlex.quote(value)}" for name, value in stage.environment.items()]
            say(f"{folder}{' '.join([*set_, shlex.join(stage.command.words)])}{of_file}")

    def write(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _about(stage: StageSpec) -> str:
    after = f", after {', '.join(stage.after)}" if stage.after else ""
    retries = f" {stage.retries} times" if stage.retries is not None else ""
    restart = "" if stage.restart == "no" else f", restart {stage.restart}{retries}"
    ready = "" if stage.ready == "started" else f", ready when {stage.ready}"
    return f"{stage.name}{after}{restart}{ready}"


def planned(found: RunFile, folder: Path, device_memory: int | None) -> RunPlan:
    """Plan all stages; write nothing. `folder`: of the run. Raises: ConfigError; PlanError, with
    the sum."""
    gpus.check(devices_of(found), f"{found.path}: daemon.device" if found.path else "-d")
    omni = [stage for stage in found.stages.values() if stage.command.kind == "vllm-omni"]
    if not omni and not on_host(found):
        return _plain(found, folder, device_memory)
    if not omni or {table.device for table in found.daemons} == {"host"}:
        return _unplanned(found, omni)
    return _of_omni(found, omni, folder, device_memory)


def _of_omni(
    found: RunFile, omni: Sequence[StageSpec], folder: Path, device_memory: int | None
) -> RunPlan:
    paths = {stage.name: folder / f"{stage.name}.yaml" for stage in omni}
    deployed = {stage.name: _deployed(stage, found, paths[stage.name]) for stage in omni}
    check_names(found, deployed)
    beside = [stage for stage in found.stages.values() if stage.command.kind == "vllm"]
    folders = map(servers.model_folder, map(_seen_from_here, omni))
    plan = reports_of(
        [StageFile(deployed[s.name], [str(at)]) for s, at in zip(omni, folders, strict=True)],
        _plan_options(found, device_memory),
        servers=lambda totals: [_server(stage, found, totals) for stage in beside],
        on={gpu for stage in beside for gpu in gpus_of(stage, found)},
        budgets=_given_budgets(found, deployed.values()),
    )
    texts = [report.overlay for report in plan.reports]
    return _with_plan(found, plan, dict(zip(paths.values(), texts, strict=True)))


def _with_plan(found: RunFile, plan: JointPlan, overlays: Mapping[Path, str]) -> RunPlan:
    for gpu in plan.gpus:
        for line in without_graphs(gpu):
            note(line)
        for each in streaming(gpu):
            errors.print(each, soft_wrap=True)
    daemons = _daemons(found, plan)
    return RunPlan(_with(found, daemons, overlays), daemons, overlays)


def _unplanned(found: RunFile, omni: Sequence[StageSpec]) -> RunPlan:
    seen = {stage.name: _seen_from_here(stage) for stage in omni}
    for command in seen.values():
        _refuse_offload(command)
    read = {name: _deploy_of(command) for name, command in seen.items()}
    if omni:
        theirs = all(one and one.has_components for one in read.values())
        workers = "" if theirs else ": have its --deploy-config name swapd's workers"
        note(f"vllm-omni runs with its own settings, since swapd plans it for GPUs only{workers}")
    check_names(found, read)
    daemons = [one for table in found.daemons for one in _usual(table, found)]
    return RunPlan(_with(found, daemons), daemons)


def _refuse_offload(command: Command) -> None:
    named = option(command.words, DEPLOY_CONFIG) or ""
    if command.offload.cpu_offload_enabled or offload_flags.in_file(Path(named)):
        raise PlanError(
            f"{shlex.join(command.words[:2])}: cpu_offload settings are for stages on GPUs, and "
            "the daemon is on the host: leave them out, or name a GPU"
        )


def _plain(found: RunFile, folder: Path, device_memory: int | None) -> RunPlan:
    """Plan servers of plain vLLM on GPUs, each as a stage if layers of any have to stream.

    Raises: PlanError, with the sum, if they do not fit even so.
    """
    refused = None
    try:
        if (streaming := _as_stages(found, folder, device_memory)) is not None:
            return streaming
    except DoesNotFit as exc:
        refused = exc
    except (PlanError, ModuleNotFoundError):
        pass  # the size of a model is unknown, or there is no PyYAML
    try:
        return _unplanned(found, ())
    except PlanError as exc:
        raise refused or exc from None


def _as_stages(found: RunFile, folder: Path, device_memory: int | None) -> RunPlan | None:
    servers_of_vllm = [one for one in found.stages.values() if one.command.kind == "vllm"]
    files = [_as_file(stage, found, folder) for stage in servers_of_vllm]
    if not files:
        return None
    given = _given_budgets(found, [file.deploy for file in files])
    plan = reports_of(files, _plan_options(found, device_memory), budgets=given)
    if not any(gpu.streams for gpu in plan.gpus):
        return None
    check_names(found, {})
    stages = {**found.stages}
    for stage, file, changes in zip(servers_of_vllm, files, plan.changes, strict=True):
        (one,) = file.deploy.stages
        own = {"additional_config": one.additional, "max_num_batched_tokens": one.step_tokens}
        command = servers.as_planned(stage.command, {**own, **changes[one.id]})
        stages[stage.name] = stage._replace(command=command)
    return _with_plan(found._replace(stages=stages), plan, {})


def _as_file(stage: StageSpec, found: RunFile, folder: Path) -> StageFile:
    seen = _seen_from_here(stage)
    if seen.model is None:
        raise PlanError(f"{stage.name}: say which model: its command has none after serve")
    model = servers.model_folder(seen)
    entry = servers.as_stage(stage.command, gpus_of(stage, found))
    deployed = deploy.read(folder / f"{stage.name}.yaml", {"stages": [entry]})
    (one,), rooms = deployed.stages, []
    if one.kv_cache_bytes is not None:
        needs = claims.needs_of(one, None, sizes.config_of(model))
        rooms.append(f"{one.name}={needs.workspace + one.kv_cache_bytes}")
    return StageFile(deployed, [str(model)], rooms)


def _with(
    found: RunFile, daemons: Sequence[DaemonSpec], overlays: Collection[Path] = ()
) -> RunFile:
    stages, paths = {}, {path.stem: path for path in overlays}
    for name, stage in found.stages.items():
        if name in paths:
            command = stage.command.with_option(DEPLOY_CONFIG, str(paths[name]))
            stages[name] = stage._replace(command=command)
            continue
        shown = {} if VISIBLE_VARIABLE in stage.environment else _shown(stage, found)
        stages[name] = stage._replace(
            command=servers.with_worker(stage.command, daemons),
            environment={**shown, **stage.environment},
        )
    return found._replace(stages=stages)


def _shown(stage: StageSpec, found: RunFile) -> dict[str, str]:
    on = devices_of(found) or [table.device for table in found.daemons if table.device]
    source = f"[daemon] of {found.path}" if found.path else "-d"
    return servers.on_devices(stage.command, on, source)


def _seen_from_here(stage: StageSpec) -> Command:
    """Return the command, with its program and files as this process finds them."""
    command, folder = stage.command, stage.directory
    program = command.words[0]
    at = str(folder / program) if "/" in program else program
    words = [shutil.which(at, path=stage.environment.get("PATH")) or at, *command.words[1:]]
    named = [command.model, option(command.words, DEPLOY_CONFIG)]
    for name in [name for name in named if name and (folder / name).exists()]:
        there = str(folder / name)
        words = [there if w == name else w.replace(f"={name}", f"={there}") for w in words]
    return command._replace(words=tuple(words))


# --- servers of vLLM-Omni, planned together ------------------------------------------------


def _deploy_of(command: Command) -> Deploy | None:
    if command.model is None:
        return None
    try:
        file = servers.deploy_file_of(command)
        return deploy.read(file.path, installed=file.installed)
    except PlanError:
        return None  # vllm-omni reports it


def _deployed(stage: StageSpec, found: RunFile, overlay: Path) -> Deploy:
    if VISIBLE_VARIABLE in stage.environment:
        raise ConfigError(
            f"{found.path}: stages.{stage.name}.env.{VISIBLE_VARIABLE}: the GPUs of a server "
            "of vLLM-Omni are the devices of its deploy file: write them there, or set the "
            "variable for `swapd run`"
        )
    seen, devices = _seen_from_here(stage), devices_of(found)
    if seen.model is None:
        raise PlanError(f"the model is missing after serve: {shlex.join(stage.command.words)}")
    file = servers.deploy_file_of(seen)
    said = [f"the deploy file is {file.path}: {file.why}"] if file.why else []
    if {_BY_LAYER, _BY_MODEL} <= {*seen.words}:  # vllm-omni itself drops it silently
        said.append(f"{_BY_LAYER} is set too, so {_BY_MODEL} is ignored")
    own, changes = servers.with_workers(
        file,
        gpus.numbers_of(devices or budgets.devices()),
        servers.model_folder(seen),
        stage.command.offload,
    )
    for each in [*said, *changes]:
        note(each)
    deployed = deploy.read(file.path if own is None else overlay, own, file.installed)
    servers.check_placed(file.path, deployed.stages, devices)
    return deployed


def _plan_options(found: RunFile, device_memory: int | None) -> PlanOptions:
    flags = [table.flags for table in found.daemons]
    chunks = {one["chunk"] for one in flags if "chunk" in one}
    if len(chunks) > 1:
        raise ConfigError(
            f"{found.path}: daemon: the stages of vLLM-Omni are planned in chunks of one size: say "
            f"one chunk, not {' and '.join(sorted(chunks))}"
        )
    strict = "strict" in [one.get("isolation") for one in flags]
    isolation: Isolation = "strict" if strict else "relaxed"
    return PlanOptions(device_memory, chunk=next(iter(chunks), None), isolation=isolation)


def _given_budgets(found: RunFile, deployed: Iterable[Deploy]) -> dict[int, int]:
    every = {gpu for one in deployed for stage in one.stages for gpu in stage.gpus}
    tables = {gpu: _table_of(found, gpu) for gpu in every}
    return {gpu: t.budget for gpu, t in tables.items() if t and t.budget is not None}


def _server(stage: StageSpec, found: RunFile, totals: Mapping[int, int]) -> PlainServer:
    on, words = gpus_of(stage, found), stage.command.words
    weights = budgets.weights_of(_seen_from_here(stage))
    if weights is None:
        raise PlanError(f"{stage.name}: say which model: its command has none after serve")
    try:
        if (said := option(words, _KV_CACHE)) is not None:
            room = number_of(said) + kv.USUAL_BYTES["ar"]
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
    served = [gpu for gpu in plan.gpus if gpu.budget_bytes]
    if len(served) > 1:
        _check_for_all(found)
    daemons, tables = [], set()
    for gpu in served:
        table = _table_of(found, gpu.gpu)
        assert table is not None  # only devices of tables have stages
        tables.add(table.device)
        device, why = f"cuda:{gpu.gpu}", "the budget in the plan"
        one = DaemonSpec(device, gpu.budget_bytes, why, gpu.chunk_bytes)
        daemons.append(_of_table(one, table, found))
    for table in found.daemons if found.path else ():
        if table.device not in tables:
            daemons += _usual(table, found)
    return daemons


def _check_for_all(found: RunFile) -> None:
    only = _for_all(found)
    if only and (of_one := OF_ONE & only.flags.keys()):
        raise ConfigError(
            f"{found.path}: daemon.{min(of_one)}: the stages are on several GPUs, and a file with "
            "one daemon alone may set it: leave it out, or write [[daemon]] for each GPU"
        )


def _of_table(wanted: DaemonSpec, table: DaemonTable, found: RunFile) -> DaemonSpec:
    others = tuple(table.flags.items())
    if table.budget is None:
        return wanted._replace(others=others, file=found.path)
    why = f"budget of {found.path}" if found.path else "--budget"
    return wanted._replace(budget=table.budget, why=why, others=others, file=found.path)


def _for_all(found: RunFile) -> DaemonTable | None:
    return next((table for table in found.daemons if table.device is None), None)


def _table_of(found: RunFile, gpu: int) -> DaemonTable | None:
    named = (t for t in found.daemons if t.device is not None and gpu_number(t.device) == gpu)
    return next(named, _for_all(found))


def _usual(table: DaemonTable, found: RunFile) -> list[DaemonSpec]:
    commands = [
        _seen_from_here(stage)
        for stage in found.stages.values()
        if stage.command.kind != "vllm"
        or table.device == "host"
        or table in [_table_of(found, gpu) for gpu in gpus_of(stage, found)]
    ]
    devices = [] if table.device is None else [table.device]
    wanted = budgets.wanted(commands, devices, table.budget)
    return [_of_table(one, table, found) for one in wanted]
