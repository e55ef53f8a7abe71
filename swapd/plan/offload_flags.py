"""Translates vLLM-Omni's `cpu_offload_*` settings to swapd's options of each stage.

A file of `stage_args` has settings for each stage, the command line has settings for all stages;
vllm-omni reads neither.
"""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from swapd.plan import sizes
from swapd.plan.advice import PlanError
from swapd.plan.claims import names_of
from swapd.plan.deploy import BadDeploy, Deploy, DeployStage
from swapd.shared.config import ConfigError
from swapd_client.errors import InvalidArgument
from swapd_client.offload import settings
from swapd_client.offload.settings import OffloadSettings, StageSettings

_ENABLED = "cpu_offload_enabled"
_COMPONENTS = "cpu_offload_components"
_STRATEGY = "cpu_offload_strategy"
#: vllm-omni does not know the flags of these settings, but all others.
_FLAGS = (_ENABLED, _COMPONENTS, _STRATEGY, "cpu_offload_pin_memory")
#: Has the name of such a setting, but is vLLM's own.
_VLLMS = "cpu_offload_params"


def taken_off(words: Sequence[str]) -> tuple[OffloadSettings, tuple[str, ...]]:
    """Split off a command line's settings; return them and the other words. Raises: ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    settings.add_arguments(parser, _FLAGS)
    try:
        parsed, left = parser.parse_known_args(words)
        for flag in (word.partition("=")[0] for word in left if word.startswith("--cpu-offload")):
            if (name := flag.removeprefix("--").replace("-", "_")) != _VLLMS:
                settings.check_name(name, flag)
        asked = settings.from_arguments(parsed)
    except (argparse.ArgumentError, InvalidArgument) as exc:
        raise ConfigError(str(exc).removeprefix("argument ")) from None
    if asked.cpu_offload_components and not asked.cpu_offload_enabled:
        raise ConfigError("--cpu-offload-components needs --cpu-offload-enabled: add it")
    return asked, tuple(left)


def in_file(path: Path) -> list[StageSettings]:
    """Return the stages of a file of `stage_args`; [] for any other file. Raises: BadDeploy."""
    try:
        return settings.in_stage_args(path) if path.is_file() else []
    except InvalidArgument as exc:
        raise BadDeploy(str(exc)) from exc


def of_stages(
    listed: Sequence[StageSettings], found: Deploy, model: Path
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the options of the listed stages, by their ids in `found`, and lines for people about
    ignored settings. `model`: its folder. Raises: PlanError."""
    made, said = {}, []
    for one in listed:
        wanted = str(one.id if one.model_stage is None else one.model_stage)
        stage = next((each for each in found.stages if wanted in names_of(each)), None)
        if stage is None:
            raise PlanError(
                f"{one.where}: the model has no stage {wanted!r}; by {found.path} its stages are "
                f"{_listed(found)}"
            )
        if stage.id in made:
            raise PlanError(f"{one.where} is listed twice: write its settings in one place")
        made[stage.id], absent = _of_stage(stage, one.settings, found, model)
        said += [f"{one.where} has no {part} that could be offloaded" for part in absent]
        if one.others:
            said.append(
                f"{one.where}: {', '.join(one.others)} left out: only settings for offloading are "
                "read there; set others in a deploy file"
            )
    return made, said


def of_flags(asked: OffloadSettings, found: Deploy, model: Path) -> dict[int, dict[str, Any]]:
    """Return the options of all stages, by their ids: named stages take turns, others stay.
    `model`: its folder. Raises: PlanError."""
    if not asked.cpu_offload_enabled:
        return {}
    usual = OffloadSettings()
    given = {k: v for k in _FLAGS[:3] if (v := getattr(asked, k)) != getattr(usual, k)}
    both = {stage.id: _of_stage(stage, given, found, model) for stage in found.stages}
    for part in asked.cpu_offload_components or ():
        if all(part in absent for _, absent in both.values()):
            raise PlanError(
                f"--cpu-offload-components: the model has no {part}; its stages are "
                f"{_listed(found)}"
            )
    return {number: options for number, (options, _) in both.items()}


def _listed(found: Deploy) -> str:
    return ", ".join(f"{stage.id} ({stage.name})" for stage in found.stages)


def _of_stage(
    stage: DeployStage, given: Mapping[str, Any], found: Deploy, model: Path
) -> tuple[dict[str, Any], list[str]]:
    named = given.get(_COMPONENTS)
    if named is None:
        return dict(given), []
    has = [part for part in named if _has(stage, part, found, model)]
    own = [stage.name if part in names_of(stage) else part for part in has]
    options = {**given, _COMPONENTS: own}
    if own in ([], [stage.name]):  # without other parts, it takes turns with all that it has
        del options[_COMPONENTS]
    if not own:
        options.pop(_STRATEGY, None)
        options[_ENABLED] = False
    return options, [part for part in named if part not in has]


def _has(stage: DeployStage, part: str, found: Deploy, model: Path) -> bool:
    if any(part in names_of(one) for one in found.stages):
        return part in names_of(stage)
    if stage.kind == "diffusion":
        return part == "." or any(fnmatchcase(c.name, part) for c in sizes.of_path(model))
    if part == "language_model":  # checkpoints use other names for it
        return stage.kind == "ar"
    within = [f"{name}." for name in names_of(stage)]
    within += ["", "model."] if len(found.stages) == 1 else []
    return bool(sizes.within(model, [f"{prefix}{part}" for prefix in within]))
