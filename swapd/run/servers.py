"""Servers of vLLM and vLLM-Omni: their models, GPUs, deploy files, and swapd's workers in them."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swapd.plan import deploy, hub, offload_flags, omni, snippets
from swapd.plan.advice import PlanError
from swapd.plan.omni import VllmOmni
from swapd.run import gpus
from swapd.run.commands import (
    ADDITIONAL,
    DEPLOY_CONFIG,
    WORKER_CLS,
    Command,
    additional_of,
    component_of,
    division_of,
    number_of,
    option,
    shards_of,
    without,
)
from swapd.run.daemons import DaemonSpec
from swapd.shared import config
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, flag
from swapd_client.offload.settings import OffloadSettings, StageSettings
from swapd_client.vllm.options import KEY

GPU_WORKER = "swapd_client.vllm.worker.Worker"
CPU_WORKER = "swapd_client.vllm.cpu.CPUWorker"
_OURS = "swapd_client."
_CONFIG = "--config"
_NONE = OffloadSettings()
#: Options of `vllm serve` that a deploy file's stage has, too.
_NUMBERS = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
    "kv_cache_memory_bytes",
)
_TEXTS = ("dtype", "kv_cache_dtype")
#: Options for streaming layers, which swapd's worker takes as its own options.
_STREAMING: Mapping[str, Callable[[str], float]] = {
    "cpu_offload_gb": float,
    "offload_group_size": int,
    "offload_num_in_group": int,
}
#: Default tokens of a step of `vllm serve`; on GPUs of 70 GiB and more vLLM takes more.
_STEP_TOKENS = 2048


def model_folder(command: Command) -> Path:
    """Raises: NotInCache."""
    assert command.model is not None
    cache = option(command.words, "--download-dir")
    revision = option(command.words, "--revision")
    return hub.folder_of(command.model, revision, Path(cache) if cache else None)


def unread(command: Command) -> str:
    """Return a line for people if the command sets options in a way that is not read; else ""."""
    ways = [f"{_CONFIG} FILE"] * (option(command.words, _CONFIG) is not None)
    ways += [f"{ADDITIONAL}.NAME"] * any(w.startswith(f"{ADDITIONAL}.") for w in command.words)
    if command.kind == "other" or not ways:
        return ""
    options = ", ".join(map(flag, (*_NUMBERS, *_TEXTS, *_STREAMING)))
    return (
        f"{shlex.join(command.words[:2])}: swapd does not read {' and '.join(ways)}: if that sets "
        f"the model or one of these, write it into the command itself: {WORKER_CLS}, "
        f"--tensor-parallel-size, --pipeline-parallel-size, {ADDITIONAL} (in JSON), {options}"
    )


def names_swapd(command: Command, directory: Path) -> str:
    """Return the option that names swapd's classes, so that the command needs swapd; else "".
    `directory`: of the command."""
    for name in (WORKER_CLS, DEPLOY_CONFIG):
        said = option(command.words, name) or ""
        if said.startswith(_OURS) or (name == DEPLOY_CONFIG and _mentions(directory / said)):
            return f"{name} {said}"
    return ""


def _mentions(path: Path) -> bool:
    """Tell whether a deploy file names swapd's workers itself, or has `stage_args`, which vllm-omni
    does not read. Base files come with vllm-omni."""
    try:
        return _OURS in path.read_text(errors="replace") or bool(offload_flags.in_file(path))
    except OSError:
        return False  # vllm-omni reports it


def on_devices(command: Command, devices: Sequence[str], source: str) -> dict[str, str]:
    """Return variables that show these GPUs to a plain vLLM server: it takes the first visible
    GPUs.

    `source`: where the GPUs are named, as in `-d`. Raises: ConfigError if they are too few.
    """
    numbers = gpus.numbers_of(devices)
    there = len(numbers) if numbers else gpus.count() if "host" not in devices else None
    if command.kind != "vllm" or not there:
        return {}
    if (needed := shards_of(command)) > there:
        why = f"{source} names {', '.join(devices)}" if numbers else gpus.in_words()
        raise ConfigError(
            f"{shlex.join(command.words[:2])} needs {needed} GPUs (--tensor-parallel-size times "
            f"--pipeline-parallel-size), and {why}: name more of them, or divide it among {there}"
        )
    if numbers[:needed] == list(range(needed))[: len(numbers)]:
        return {}
    listed = config.listed_gpus()
    return {VISIBLE_VARIABLE: ",".join(gpus.name_of(device, listed) for device in devices)}


def with_worker(command: Command, wanted: Sequence[DaemonSpec]) -> Command:
    if command.kind != "vllm" or option(command.words, WORKER_CLS) is not None:
        return command
    on_host = all(one.device == "host" for one in wanted)
    return command.with_option(WORKER_CLS, CPU_WORKER if on_host else GPU_WORKER)


def as_stage(command: Command, on: Sequence[int]) -> dict[str, Any]:
    """Describe a plain vLLM server as the only stage of a deploy file, on these GPUs. Raises:
    PlanError for an option that is not a number."""
    words, additional = command.words, additional_of(command)
    shards, pipeline = division_of(command)
    numbers = {key: _number(words, key, number_of) for key in _NUMBERS}
    streaming = {key: _number(words, key, kind) for key, kind in _STREAMING.items()}
    ours = {key: value for key, value in streaming.items() if value}
    own = {"component": component_of(command), **ours, **additional.get(KEY, {})}
    return {
        "stage_id": 0,
        "worker_cls": GPU_WORKER,
        "devices": ",".join(map(str, on)),
        "tensor_parallel_size": shards,
        "pipeline_parallel_size": pipeline,
        "max_num_batched_tokens": _STEP_TOKENS,
        **{key: value for key, value in numbers.items() if value},
        **{key: said for key in _TEXTS if (said := option(words, flag(key)))},
        "enforce_eager": flag("enforce_eager") in words,
        "enable_prefix_caching": "--no-enable-prefix-caching" not in words,
        "additional_config": {**additional, KEY: own},
    }


def as_planned(command: Command, settings: Mapping[str, Any]) -> Command:
    for key in _STREAMING:  # `additional_config` has them now
        command = command._replace(words=without(command.words, flag(key)))
    for key, value in settings.items():
        if value is not True:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            command = command.with_option(flag(key), text)
        elif flag(key) not in command.words:
            command = command.with_option(flag(key))
    return command


def _number(words: Sequence[str], key: str, kind: Callable[[str], float]) -> float | None:
    said = option(words, flag(key))
    try:
        return None if said in (None, "auto", "-1") else kind(said)
    except ValueError as exc:
        raise PlanError(f"{flag(key)} {said} is no number that swapd reads") from exc


# --- deploy files --------------------------------------------------------------------------


class DeployFile(NamedTuple):
    path: Path
    #: None if unknown, and not needed.
    installed: VllmOmni | None
    #: How it was found, for people; "" if the command names it.
    why: str = ""
    #: Settings in the file of `stage_args` that the command names.
    listed: Sequence[StageSettings] = ()


def deploy_file_of(command: Command) -> DeployFile:
    """Return the file that the command names. If it names none, or a file of `stage_args`, return
    the file that its vllm-omni chooses for the model.

    Blocks while it asks the command's Python. Raises: PlanError.
    """
    named = option(command.words, DEPLOY_CONFIG)
    listed = offload_flags.in_file(Path(named)) if named else []
    if named is None or listed:
        assert command.model is not None
        models = [str(model_folder(command)), command.model]
        return chosen(omni.of_command(command.words, models), listed)
    path = Path(named)
    try:
        installed = omni.of_command(command.words)
    except PlanError:
        return DeployFile(path, None)
    shipped = installed.folder / "deploy" / named
    is_shipped = not path.exists() and path.name == named and shipped.is_file()
    return DeployFile(shipped if is_shipped else path, installed)


def chosen(installed: VllmOmni, listed: Sequence[StageSettings]) -> DeployFile:
    """Return the file that vLLM-Omni chooses for its model. Blocks. Raises: PlanError."""
    path, why = installed.deploy_file()
    return DeployFile(path, installed, why, listed)


def with_workers(
    file: DeployFile, usable: Sequence[int], model: Path, flags: OffloadSettings = _NONE
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return an overlay with swapd's worker for each stage, on usable GPUs, and the wanted
    offloading, or None if the file needs no change; and lines for people about other changes.

    `usable`: GPUs to use; empty if unknown. `model`: its folder. `flags`: of the command. Raises:
    PlanError.
    """
    found = deploy.read(file.path, installed=file.installed)
    ours = any(stage.ours for stage in found.stages)
    options, said = offload_flags.of_stages(file.listed, found, model)
    options |= offload_flags.of_flags(flags, found, model)
    if ours and not options:
        return None, said
    stages = []
    for stage in found.stages:
        entry: dict[str, Any] = {"stage_id": stage.id}
        if not ours:
            entry |= snippets.worker(stage.kind)
            said += _move(entry, stage, usable)
        if stage.id in options:
            both = {**stage.additional.get(KEY, {}), **options[stage.id]}
            entry["additional_config"] = {**stage.additional, KEY: both}
        stages.append(entry)
    return {"base_config": str(file.path.absolute()), "stages": stages}, said


def _move(entry: dict[str, Any], stage: deploy.DeployStage, usable: Sequence[int]) -> list[str]:
    if not usable or len(stage.gpus) > 1 or stage.gpus[0] in usable:
        return []
    entry["devices"] = str(usable[0])
    return [f"{stage.name} is placed on GPU {usable[0]}, not {stage.gpus[0]}"]


def check_placed(path: Path, stages: Iterable[deploy.DeployStage], given: Sequence[str]) -> None:
    """Raise PlanError unless the machine and `given` have the GPUs of a deploy file's stages."""
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
