"""The names of vLLM-Omni's stages, read from its source without importing it.

A deploy file has neither names nor kinds of its stages: the pipeline has both. Either the file
names the pipeline, or the pipeline names the file.
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
    """The folder of vLLM-Omni's package; None if it is not installed."""
    spec = find_spec(_PACKAGE)
    for found in (spec.submodule_search_locations or ()) if spec else ():
        return Path(found)
    return None


def stages_of(
    pipeline: str | None, deploy_names: list[str], package: Path | None = None
) -> dict[int, tuple[str, Kind]]:
    """Name and kind of each stage, by its id; empty if the pipeline is not found.

    The pipeline has the name `pipeline`, else one of `deploy_names` as its default deploy file.
    `package`: the folder of vLLM-Omni, if it is not that of this Python.
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
    """The source of a file, parsed; empty if it is unreadable."""
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
    """The value of a literal; None for any other node."""
    return node.value if isinstance(node, ast.Constant) else None
