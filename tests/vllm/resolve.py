"""Deploy files through vLLM-Omni's own configuration code, without a model or a GPU."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

#: No engine starts, so the folder need not exist.
MODEL = "/no/model"


def stages_of(pipeline: str, path: str) -> list[dict[str, Any]]:
    """Engine arguments of each stage, and its devices."""
    from transformers import CONFIG_MAPPING
    from vllm_omni.config.omni_config import VllmOmniConfig
    from vllm_omni.config.pipeline_registry import resolve_pipeline_config
    from vllm_omni.config.stage_config import load_deploy_config
    from vllm_omni.engine.stage_init_utils import build_engine_args_dict_from_omni_stage_config

    # some have variants; the model's own configuration chooses one
    model = CONFIG_MAPPING[pipeline]() if pipeline in CONFIG_MAPPING else None
    config = VllmOmniConfig.from_pipeline_config(
        resolve_pipeline_config(pipeline, model),
        user_deploy_config=load_deploy_config(path),
        cli_overrides={"model": MODEL},
    )
    return [
        {
            **build_engine_args_dict_from_omni_stage_config(stage, MODEL),
            "devices": stage.runtime_config.devices,
        }
        for stage in config.stage_configs
    ]


def _said(pipeline: str, path: str) -> list[dict[str, Any]] | str:
    try:
        return stages_of(pipeline, path)
    except Exception as exc:  # noqa: BLE001  # vLLM-Omni's to choose
        return f"{type(exc).__name__}: {exc}"


def resolve(files: Sequence[tuple[str, str]]) -> Any:
    """For each pipeline and file, the stages' engine arguments, or the error."""
    return json.loads(json.dumps([_said(*one) for one in files], default=str))


def printed(program: str, arguments: Sequence[str]) -> str:
    """The output of `python -c PROGRAM ARGUMENTS`, run here."""
    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {"__name__": "__main__"})  # of swapd itself
    return out.getvalue()
