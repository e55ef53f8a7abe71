"""Asks an installed vLLM-Omni, in the Python that runs it: its folder, deploy files, pipelines.

A deploy file lacks the names and kinds of its stages, which its pipeline has. Either the file names
the pipeline, or the pipeline names the file.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Literal

from swapd.plan.advice import PlanError
from swapd.shared import config

Kind = Literal["ar", "generation", "diffusion"]

#: Longest start of an interpreter, whose site may be on a network; vLLM-Omni imports for 20 s.
_START_S = 60.0
_IMPORT_S = 300.0
_HEAD_BYTES = 4096
_NAME_ONE = "Name a deploy file: --deploy-config FILE"

#: Prints the package's folder without importing it. For a script, ignores the current folder.
_WHERE = """
import sys
from importlib.util import find_spec
if sys.argv[1] == "script":
    sys.path = [p for p in sys.path if p]
spec = find_spec("vllm_omni")
for folder in spec.submodule_search_locations if spec else ():
    print(folder)
    break
"""
#: Prints all pipelines, and the one that vLLM-Omni chooses for the first model that has one.
_PIPELINES = """
import json, sys
if sys.argv[1] == "script":
    sys.path = [p for p in sys.path if p]
from vllm_omni.config.config_factory import StageConfigFactory
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

def described(pipeline):
    stages = [(s.stage_id, s.model_stage, s.execution_type.value) for s in pipeline.stages]
    return {"type": pipeline.model_type, "file": pipeline.default_deploy_config_name,
            "stages": stages}

def usual(key, entry):
    if not callable(entry):
        return entry
    from transformers import CONFIG_MAPPING  # it chooses by the model's configuration
    return entry(CONFIG_MAPPING[key]() if key in CONFIG_MAPPING else None)

chosen, about = None, ""
for model in sys.argv[2:]:
    about = about or StageConfigFactory.try_infer_model_type(model, False) or ""
    if chosen := StageConfigFactory.get_pipeline_config(model, False):
        break
known = [usual(key, entry) for key, entry in OMNI_PIPELINES.items()]
print(json.dumps({
    "chosen": chosen and described(chosen), "about": about,
    "known": [described(pipeline) for pipeline in known if pipeline is not None],
}))
"""


class VllmOmni:
    def __init__(
        self, folder: Path, python: Sequence[str], how: str, models: Sequence[str]
    ) -> None:
        """`how`: whether a script or a module runs. `models`: folder and name of the model that
        `deploy_file` is about, if any."""
        self.folder = folder
        self._python = python
        self._how = how
        self._models = models

    def deploy_file(self) -> tuple[Path, str]:
        """Return the model's deploy file, and why. Blocks for half a minute. Raises: PlanError."""
        said, chosen = self._said["about"], self._said["chosen"]
        about = f"model_type {said}" if said else f"its name, {self._models[-1]}"
        if chosen is None:
            raise self._none(f"no pipeline is for {about}")
        if chosen["file"] is None:
            raise self._none(f"its pipeline {chosen['type']} ({about}) has none of its own")
        return self.folder / "deploy" / str(chosen["file"]), about

    def stages_of(self, pipeline: str | None, files: Sequence[str]) -> dict[int, tuple[str, Kind]]:
        """Return name and kind of each stage, by id; {} if the pipeline is not known.

        The pipeline is called `pipeline`, or else has one of `files` as its deploy file. Blocks for
        half a minute, once. Raises: PlanError.
        """
        chosen = self._said["chosen"]
        for one in [*([chosen] if chosen else []), *self._said["known"]]:
            if (one["type"] == pipeline) if pipeline else (one["file"] in files):
                stages = [stage for stage in one["stages"] if stage[2] in _KINDS]
                return {number: (name, _KINDS[kind]) for number, name, kind in stages}
        return {}

    @cached_property
    def _said(self) -> dict[str, Any]:
        done = _output([*self._python, "-c", _PIPELINES, self._how, *self._models], _IMPORT_S)
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            why = _last(done.stderr) or "it does not answer"
            raise PlanError(
                f"{self.folder} cannot be asked for its pipelines: {why}. Name a deploy file "
                "(--deploy-config FILE) whose stages all name swapd's workers and their components"
            ) from None
        return found

    def _none(self, why: str) -> PlanError:
        return PlanError(
            f"no deploy file is found for this model by {self.folder}: {why}. {_NAME_ONE}, one of "
            f"{self.folder / 'deploy'} or your own"
        )


_KINDS: dict[str, Kind] = {
    "llm_ar": "ar",
    "llm_generation": "generation",
    "diffusion": "diffusion",
}


def of_this_python(models: Sequence[str] = ()) -> VllmOmni | None:
    """Find the vLLM-Omni of this Python; None if not installed. `models`: as in `VllmOmni`."""
    spec = find_spec("vllm_omni")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return VllmOmni(Path(folder), [sys.executable], "module", models)
    return None


def of_command(words: Sequence[str], models: Sequence[str] = ()) -> VllmOmni:
    """Find the vLLM-Omni of a command's Python. Blocks while Python starts. Raises: PlanError."""
    python, how = _python(words)
    done = _output([*python, "-c", _WHERE, how], _START_S)
    if not (said := done.stdout.strip()):
        why = f": {last}" if (last := _last(done.stderr)) else ""
        raise PlanError(
            f"{shlex.join(python)}, which {words[0]} runs on, has no vllm_omni{why}: install it "
            f"there. {_NAME_ONE}"
        )
    return VllmOmni(Path(said), python, how, models)


def _output(asked: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            asked,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=config.environment_with(HF_HUB_OFFLINE="1"),
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PlanError(f"{asked[0]}: {exc}. {_NAME_ONE}") from exc


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _python(words: Sequence[str]) -> tuple[list[str], str]:
    found = shutil.which(words[0])
    if found is None:
        raise PlanError(
            f"there is no command {words[0]!r}: install it, or write its whole path. {_NAME_ONE}"
        )
    if PurePath(words[0]).name.startswith("python"):
        return [found], "module"
    if (named := _named_in(Path(found))) is not None:
        return named, "script"
    beside = Path(found).resolve().with_name("python")
    if beside.exists():
        return [str(beside)], "script"
    raise PlanError(
        f"the Python of {found} is unknown: its first line does not name one. {_NAME_ONE}"
    )


def _named_in(script: Path) -> list[str] | None:
    """Return the Python that the script's first line names. If that would be too long for the
    kernel, the first line is `#!/bin/sh`, and the second names it."""
    try:
        with script.open("rb") as file:
            first, second, *_ = [*file.read(_HEAD_BYTES).decode().splitlines(), "", ""]
        line = second.replace("'''exec'", "").split('"$0"')[0] if first == "#!/bin/sh" else first
        words = shlex.split(line.removeprefix("#!"))
    except (OSError, ValueError):
        return None
    if words and PurePath(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words if words and PurePath(words[0]).name.startswith("python") else None
