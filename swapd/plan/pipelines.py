"""What vLLM-Omni's pipelines call their stages, read from its source: it is not imported.

A deploy file names neither its stages nor their kinds: both are fixed in the pipeline, which the
file names, or which names the file.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["ar", "generation", "diffusion"]

_PACKAGE = "vllm_omni"
_KINDS: dict[str, Kind] = {
    "LLM_AR": "ar",
    "LLM_GENERATION": "generation",
    "DIFFUSION": "diffusion",
}


def folder() -> Path | None:
    """Where vLLM-Omni is installed; None if it is not."""
    spec = find_spec(_PACKAGE)
    for found in (spec.submodule_search_locations or ()) if spec else ():
        return Path(found)
    return None


def stages_of(
    pipeline: str | None, deploy_names: list[str], package: Path | None = None
) -> dict[int, tuple[str, Kind]]:
    """Name and kind of each stage, by its id; of none if the pipeline is not found.

    It is called `pipeline`, or is the one that has one of these deploy files for its own.
    `package`: where vLLM-Omni is, if it is not this Python's that is meant.
    """
    package = package or folder()
    models = sorted(package.glob("model_executor/models/*/pipeline.py")) if package else []
    for path in models:
        for call in calls(parsed(path), "PipelineConfig"):
            said = {k.arg: k.value for k in call.keywords}
            named = constant(said.get("model_type"))
            own = constant(said.get("default_deploy_config_name"))
            if named == pipeline if pipeline else own in deploy_names:
                return dict(_stages(call))
    return {}


def _stages(pipeline: ast.Call) -> Iterator[tuple[int, tuple[str, Kind]]]:
    for call in calls(pipeline, "StagePipelineConfig"):
        said = {k.arg: k.value for k in call.keywords}
        number, name = (constant(said.get(k)) for k in ("stage_id", "model_stage"))
        kind = said.get("execution_type")
        of = kind.attr if isinstance(kind, ast.Attribute) else "LLM_AR"
        if isinstance(number, int) and isinstance(name, str) and of in _KINDS:
            yield number, (name, _KINDS[of])


def parsed(path: Path) -> ast.Module:
    """The source of a file; of one that cannot be read, nothing."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ast.Module([], [])


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """All calls of `name(...)` in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None of what is none."""
    return node.value if isinstance(node, ast.Constant) else None
