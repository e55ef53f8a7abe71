"""Servers of vLLM and vLLM-Omni: their models, GPUs, deploy files, and swapd's workers in them."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swapd.plan import deploy, hub, omni
from swapd.plan.advise import PlanError
from swapd.plan.omni import VllmOmni
from swapd.run import gpus
from swapd.run.commands import DEPLOY_CONFIG, WORKER_CLS, Command, option, shards_of
from swapd.run.daemons import DaemonSpec
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError

#: swapd's worker of plain vLLM.
GPU_WORKER = "swapd_client.vllm.worker.Worker"
CPU_WORKER = "swapd_client.vllm.cpu.CPUWorker"
_OURS = "swapd_client."


def model_folder(command: Command) -> Path:
    """The folder of a server's model, or its place in the cache of Hugging Face. Raises:
    NotInCache."""
    assert command.model is not None
    cache = option(command.words, "--download-dir")
    revision = option(command.words, "--revision")
    return hub.folder_of(command.model, revision, Path(cache) if cache else None)


def names_swapd(command: Command, directory: Path) -> str:
    """The option that names swapd's classes, so that the command cannot run without swapd; "" if
    none does. `directory`: the command's own."""
    for name in (WORKER_CLS, DEPLOY_CONFIG):
        said = option(command.words, name) or ""
        if said.startswith(_OURS) or (name == DEPLOY_CONFIG and _mentions(directory / said)):
            return f"{name} {said}"
    return ""


def _mentions(path: Path) -> bool:
    """Whether a deploy file itself names swapd's workers; its base file is vllm-omni's."""
    try:
        return _OURS in path.read_text(errors="replace")
    except OSError:
        return False  # vllm-omni says so


def on_devices(command: Command, devices: Sequence[str], source: str) -> dict[str, str]:
    """Variables that have a plain vLLM server use these GPUs: it takes the first visible ones.

    `source`: the option that names them, as `-d`. Raises: ConfigError if they are too few.
    """
    numbers = gpus.numbers_of(devices)
    there = len(numbers) if numbers else gpus.count() if "host" not in devices else None
    if command.kind != "vllm" or not there:
        return {}
    if (needed := shards_of(command)) > there:
        why = f"{source} names {', '.join(devices)}" if numbers else gpus.in_words()
        raise ConfigError(
            f"{shlex.join(command.words[:2])} needs {needed} GPUs (--tensor-parallel-size), and "
            f"{why}: name more of them, or give --tensor-parallel-size {there}"
        )
    if numbers[:needed] == list(range(needed))[: len(numbers)]:
        return {}
    return {VISIBLE_VARIABLE: gpus.visible_as(devices)}


def with_worker(command: Command, wanted: Sequence[DaemonSpec]) -> Command:
    """A server of plain vLLM with swapd's worker; other commands, or one with a worker, as is."""
    if command.kind != "vllm" or option(command.words, WORKER_CLS) is not None:
        return command
    on_host = all(one.device == "host" for one in wanted)
    return command.with_option(WORKER_CLS, CPU_WORKER if on_host else GPU_WORKER)


# --- deploy files --------------------------------------------------------------------------


class DeployFile(NamedTuple):
    """The deploy file of a vllm-omni command."""

    path: Path
    #: The vLLM-Omni that runs it; None if that is unknown, and not needed.
    installed: VllmOmni | None
    #: How it was found, for people; empty if the command names it.
    why: str = ""


def deploy_file_of(command: Command) -> DeployFile:
    """The file that the command names, else the one that its vllm-omni chooses for the model.

    Blocks while it asks the command's Python. Raises: PlanError.
    """
    named = option(command.words, DEPLOY_CONFIG)
    if named is None:
        assert command.model is not None
        asked_of = [str(model_folder(command)), command.model]
        installed = omni.of_command(command.words, asked_of)
        path, why = installed.deploy_file()
        return DeployFile(path, installed, why)
    path = Path(named)
    try:
        installed = omni.of_command(command.words)
    except PlanError:
        return DeployFile(path, None)
    shipped = installed.folder / "deploy" / named
    is_shipped = not path.exists() and path.name == named and shipped.is_file()
    return DeployFile(shipped if is_shipped else path, installed)


def with_workers(
    file: DeployFile, usable: Sequence[int]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The overlay with which each stage of a deploy file uses swapd's worker, on existing GPUs;
    None if a stage already uses one. And its other changes, for people.

    `usable`: GPUs to use; empty if unknown.
    """
    found = deploy.read(file.path, installed=file.installed)
    if any(stage.ours for stage in found.stages):
        return None, []
    stages, moved = [], []
    for stage in found.stages:
        entry: dict[str, Any] = {"stage_id": stage.id}
        key = "worker_extension_cls" if stage.kind == "diffusion" else "worker_cls"
        entry[key] = deploy.WORKERS[stage.kind]
        if stage.kind == "generation":  # else it captures graphs before its weights are in swapd
            entry["enforce_eager"] = True
        if usable and len(stage.gpus) == 1 and stage.gpus[0] not in usable:
            entry["devices"] = str(usable[0])
            moved.append(f"{stage.name} is placed on GPU {usable[0]}, not {stage.gpus[0]}")
        stages.append(entry)
    return {"base_config": str(file.path.absolute()), "stages": stages}, moved


def check_placed(path: Path, stages: Iterable[deploy.DeployStage], given: Sequence[str]) -> None:
    """Check that the machine has the GPUs of a deploy file's stages, and that `given` has them.

    Raises: PlanError.
    """
    there, named = gpus.count(), gpus.numbers_of(given)
    for stage in stages:
        if there is not None and (absent := set(stage.gpus).difference(range(there))):
            why = f"and {gpus.in_words()}. It counts the GPUs that {VISIBLE_VARIABLE} shows"
            raise _misplaced(path, stage, absent, why, named or range(there))
        if named and stage.ours and (absent := set(stage.gpus).difference(named)):
            why = f"and the daemons are for {', '.join(given)}"
            raise _misplaced(path, stage, absent, why, named)


def _misplaced(
    path: Path, stage: deploy.DeployStage, absent: set[int], why: str, usable: Iterable[int]
) -> PlanError:
    on, listed = (", ".join(map(str, sorted(some))) for some in (absent, usable))
    return PlanError(
        f"{path}: stage {stage.id} ({stage.name}) is on GPU {on} by its devices, {why}: set its "
        f"devices to some of {listed or 'none'}, or give it that GPU. Nothing was started"
    )
