"""Finds the deploy file that vLLM-Omni would choose for a model, by reading its source.

It follows vLLM-Omni's rules: it looks up the `model_type` of the model's config.json in the
registry of pipelines, else the architectures, the class in model_index.json, or the model's name.
It does not import vLLM-Omni, which would take half a minute.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swapd.plan import sizes
from swapd.plan.advise import PlanError
from swapd.plan.pipelines import calls, constant, parsed

_REGISTRY = "config/pipeline_registry.py"
_NAMED = "OMNI_PIPELINES"
#: A pipeline's test of a config, if two pipelines have the same architecture.
_TEST = re.compile(r"str\(getattr\((\w+), '(\w+)', ''\)\) == '([^']*)'")


class NoDeployFile(PlanError):
    """No deploy file is found, or several match; the message says how to name one."""


class Found(NamedTuple):
    """A deploy file, and the reason for the choice, for people."""

    path: Path
    why: str


class Pipeline(NamedTuple):
    """A pipeline, and the models for which it is."""

    name: str
    deploy: str | None
    architectures: tuple[str, ...]
    classes: tuple[str, ...]
    #: Its test of a config, as source; None if it has none.
    test: str | None


class Registered(NamedTuple):
    """The pipelines under a key of the registry: one, or several for a function to choose from."""

    pipelines: tuple[Pipeline, ...]
    #: The fields of a config that the function reads.
    decided_by: tuple[str, ...]


def deploy_file(package: Path, model: Path, name: str = "") -> Found:
    """The file for the model in a folder, from the vLLM-Omni at `package`. Raises: PlanError.

    `name`: the model's name, if it is not the folder's.
    """
    registry = registered(package)
    if not registry:
        raise _none(package, "this version of it has no registry of pipelines that swapd can read")
    config = dict(sizes.config_of(model)) if (model / "config.json").exists() else {}
    pipeline, why = _chosen(registry, config, model, package, name or model.name)
    if pipeline.deploy is None:
        raise _none(package, f"its pipeline {pipeline.name} ({why}) has none of its own")
    path = package / "deploy" / pipeline.deploy
    if not path.is_file():
        raise _none(package, f"{pipeline.deploy}, that of {pipeline.name} ({why}), is not there")
    return Found(path, why)


def _none(package: Path, why: str) -> NoDeployFile:
    return NoDeployFile(
        f"no deploy file is found for this model: {why}. Name one: --deploy-config FILE, one of "
        f"{package / 'deploy'} or your own"
    )


# --- which pipeline ------------------------------------------------------------------------


def _chosen(
    registry: Mapping[str, Registered],
    config: Mapping[str, Any],
    model: Path,
    package: Path,
    name: str,
) -> tuple[Pipeline, str]:
    named = config.get("model_type") or config.get("architecture")
    if named is None:
        return _without_type(registry, model, package, name)
    if (entry := registry.get(str(named))) is not None:
        return _decided(entry, str(named), config), f"model_type {named}"
    wanted = config.get("architectures") or ()
    for pipeline in _all(registry):
        shared = [a for a in pipeline.architectures if a in wanted]
        if shared and (pipeline.test is None or _passes(pipeline, config)):
            return pipeline, f"architecture {shared[0]}"
    about = f"model_type {named}" + (f", architectures {', '.join(wanted)}" if wanted else "")
    raise _none(package, f"no pipeline is for {about}")


def _without_type(
    registry: Mapping[str, Registered], model: Path, package: Path, name: str
) -> tuple[Pipeline, str]:
    """The pipeline of the class in model_index.json, else of the longest key in its name."""
    if (index := model / "model_index.json").exists():
        cls = sizes.config_of(index).get("_class_name")
        for pipeline in _all(registry):
            if cls in pipeline.classes:
                return pipeline, f"{cls} in model_index.json"
    bare = _bare(name)
    keys = sorted((key for key in registry if _bare(key) in bare), key=len)
    if not keys:
        raise _none(package, f"{model} has no model_type, and no pipeline has its name")
    return _decided(registry[keys[-1]], keys[-1], {}), f"{keys[-1]} in its name"


def _decided(entry: Registered, key: str, config: Mapping[str, Any]) -> Pipeline:
    """The pipeline under a key; if a function chooses, the pipeline with the key's name."""
    if len(entry.pipelines) == 1:
        return entry.pipelines[0]
    denied = [f"{field}: {config[field]}" for field in entry.decided_by if _denied(config, field)]
    usual = [p for p in entry.pipelines if p.name == key]
    if denied or not usual:
        several = ", ".join(f"{p.deploy or 'none'} of {p.name}" for p in entry.pipelines)
        by = ", ".join(denied) or f"{', '.join(entry.decided_by)} in its config"
        raise NoDeployFile(
            f"several deploy files match {key}: {several}; vllm-omni decides by {by}. Name one: "
            "--deploy-config FILE"
        )
    return usual[0]


def _denied(config: Mapping[str, Any], field: str) -> bool:
    return field in config and not config[field]


def _passes(pipeline: Pipeline, config: Mapping[str, Any]) -> bool:
    match = _TEST.fullmatch(pipeline.test or "")
    if match is None:
        raise NoDeployFile(
            f"{pipeline.deploy} of {pipeline.name} may match, if {pipeline.test}, which swapd "
            "cannot evaluate. Name one: --deploy-config FILE"
        )
    return str(config.get(match[2], "")) == match[3]


def _all(registry: Mapping[str, Registered]) -> Iterator[Pipeline]:
    for entry in registry.values():
        yield from entry.pipelines


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# --- the registry --------------------------------------------------------------------------


def registered(package: Path) -> dict[str, Registered]:
    """The registry's entries, by model type; empty if this version has another form of it."""
    tree = parsed(package / _REGISTRY)
    from_where = {
        alias.asname or alias.name: (_file(package, node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    modules: dict[Path, _Module] = {}
    found = {}
    for key, named in _entries(tree):
        if named not in from_where:
            continue
        path, name = from_where[named]
        module = modules.get(path) or modules.setdefault(path, _Module(path))
        if entry := module.entry(name):
            found[key] = entry
    return found


def _entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        target = node.target if isinstance(node, ast.AnnAssign) else next(iter(targets), None)
        if not (isinstance(target, ast.Name) and target.id == _NAMED):
            continue
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, of in zip(value.keys, value.values, strict=True):
                if isinstance(said := constant(key), str) and isinstance(of, ast.Name):
                    yield said, of.id


def _file(package: Path, module: str) -> Path:
    return package.joinpath(*module.split(".")[1:]).with_suffix(".py")


class _Module:
    """A module of pipelines, by the names in it."""

    def __init__(self, path: Path) -> None:
        tree = parsed(path)
        self._values = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self._functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}

    def entry(self, name: str) -> Registered | None:
        if (pipeline := self._pipeline(name)) is not None:
            return Registered((pipeline,), ())
        function = self._functions.get(name)
        if function is None:
            return None
        config = function.args.args[0].arg if function.args.args else ""
        read = [
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == config
        ]
        returned = [
            node.value.id
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
        ]
        found = [p for each in returned if (p := self._pipeline(each)) is not None]
        return Registered(tuple(found), tuple(dict.fromkeys(read))) if found else None

    def _pipeline(self, name: str) -> Pipeline | None:
        call = next(calls(self._values.get(name, ast.Module([], [])), "PipelineConfig"), None)
        if call is None:
            return None
        said = {k.arg: k.value for k in call.keywords}
        deploy = constant(said.get("default_deploy_config_name"))
        test = said.get("hf_config_predicate")
        cls = constant(said.get("diffusers_class_name"))
        return Pipeline(
            name=str(constant(said.get("model_type")) or name),
            deploy=deploy if isinstance(deploy, str) else None,
            architectures=self._texts(said.get("hf_architectures")),
            classes=(*((cls,) if isinstance(cls, str) else ()), *self._texts(said.get(_ALIASES))),
            test=ast.unparse(test.body if isinstance(test, ast.Lambda) else test) if test else None,
        )

    def _texts(self, node: ast.AST | None) -> tuple[str, ...]:
        """A tuple of texts, or of a name for one in this module."""
        if isinstance(node, ast.Name):
            node = self._values.get(node.id)
        listed = node.elts if isinstance(node, ast.Tuple | ast.List) else ()
        return tuple(text for one in listed if isinstance(text := constant(one), str))


_ALIASES = "diffusers_class_aliases"
