"""The plan of a run: daemons, files, and the final command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swapd.plan import deploy, lookup
from swapd.plan.advise import PlanError
from swapd.run import budgets, interpreter
from swapd.run.commands import DEPLOY_CONFIG, WORKER_CLS, Command, option
from swapd.run.daemons import Wanted

#: swapd's worker of plain vLLM.
GPU_WORKER = "swapd_client.vllm.worker.Worker"
CPU_WORKER = "swapd_client.vllm.cpu.CPUWorker"
_PACKAGE = "vllm_omni"


class RunPlan(NamedTuple):
    """Everything that `swapd run` is about to do."""

    command: Command
    daemons: list[Wanted]
    #: Files to write, by their paths.
    files: dict[Path, str]


def plan(command: Command, devices: Sequence[str], budget: int | None) -> RunPlan:
    """The plan for a command of any kind but vllm-omni's. Raises: PlanError, with the sum."""
    wanted = budgets.wanted([command], devices, budget)
    return RunPlan(with_worker(command, wanted), wanted, {})


def with_worker(command: Command, wanted: Sequence[Wanted]) -> Command:
    """A server of plain vLLM with swapd's worker; other commands, or one with a worker, as is."""
    if command.kind != "vllm" or option(command.words, WORKER_CLS) is not None:
        return command
    on_host = all(one.device == "host" for one in wanted)
    return command.with_option(WORKER_CLS, CPU_WORKER if on_host else GPU_WORKER)


def with_workers(
    path: Path, package: Path | None, gpus: Sequence[int]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The overlay with which each stage of a deploy file uses swapd's worker, on existing GPUs;
    None if a stage already uses one. And its other changes, for people.

    `package`: the vLLM-Omni of the command. `gpus`: GPUs to use; empty if unknown.
    """
    found = deploy.read(path, package=package)
    if any(stage.ours for stage in found.stages):
        return None, []
    stages, moved = [], []
    for stage in found.stages:
        entry: dict[str, Any] = {"stage_id": stage.id}
        key = "worker_extension_cls" if stage.kind == "diffusion" else "worker_cls"
        entry[key] = deploy.WORKERS[stage.kind]
        if stage.kind == "generation":  # else it captures graphs before its weights are in swapd
            entry["enforce_eager"] = True
        if gpus and len(stage.gpus) == 1 and stage.gpus[0] not in gpus:
            entry["devices"] = str(gpus[0])
            moved.append(f"{stage.name} is placed on GPU {gpus[0]}, not {stage.gpus[0]}")
        stages.append(entry)
    return {"base_config": str(path.absolute()), "stages": stages}, moved


class DeployFile(NamedTuple):
    """The deploy file of a vllm-omni command."""

    path: Path
    #: The folder of the vLLM-Omni that runs it; None if that is unknown, and not needed.
    package: Path | None
    #: How it was found, for people; empty if the command names it.
    why: str = ""


def deploy_file_of(command: Command) -> DeployFile:
    """The file that the command names, else the one that its vllm-omni chooses for the model.

    Blocks while it asks the command's Python. Raises: PlanError.
    """
    named = option(command.words, DEPLOY_CONFIG)
    try:
        package = interpreter.folder_of(_PACKAGE, command.words)
    except PlanError as exc:
        if named is None:
            raise PlanError(f"{exc}. Name a deploy file: {DEPLOY_CONFIG} FILE") from exc
        return DeployFile(Path(named), None)
    if named is not None:
        shipped = package / "deploy" / named
        path = Path(named)
        is_shipped = not path.exists() and path.name == named and shipped.is_file()
        return DeployFile(shipped if is_shipped else path, package)
    assert command.model is not None
    model = Path(command.model)
    if not model.is_dir():
        raise PlanError(
            f"{command.model} is not a folder, so its config.json, by which vllm-omni chooses a "
            f"deploy file, cannot be read: give the model's folder, or {DEPLOY_CONFIG} FILE"
        )
    found = lookup.deploy_file(package, model)
    return DeployFile(found.path, package, found.why)
