"""Reads the memory settings of vLLM-Omni's deploy files: stages, their GPUs, their sizes.

As in vLLM-Omni, `base_config` comes first, stages are merged by `stage_id`, then the settings for
CUDA apply. Base files, and names that a file lacks, come from an installed vLLM-Omni.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path, PurePath
from typing import Any

import msgspec

from swapd.plan import omni
from swapd.plan.advice import PlanError
from swapd.plan.omni import Kind, VllmOmni
from swapd.shared.documents import mapping, read_yaml
from swapd.shared.text import problem_with_text
from swapd_client.errors import InvalidArgument
from swapd_client.offload.settings import OffloadSettings
from swapd_client.vllm.options import KEY, options_of, options_of_stage

WORKERS: dict[Kind, str] = {
    "ar": "swapd_client.vllm.omni.ARWorker",
    "generation": "swapd_client.vllm.omni.GenerationWorker",
    "diffusion": "swapd_client.vllm.diffusion.DiffusionExtension",
}
_OURS = "swapd_client.vllm."
_STAGES_MAX = 10_000
_BASES_MAX = 16
_PROCESSES_MAX = 1024
_BYTES_MAX = 1 << 50
_TOKENS_MAX = 1 << 30
#: vLLM's own default.
DEFAULT_UTILIZATION = 0.92

#: Dictionaries of a stage that override its own keys.
INNER = ("engine_extras", "engine_args", "runtime")
#: Dictionaries of a stage that an overlay extends; it replaces all others.
_MERGED = ("default_sampling_params", "default_pooling_params", "engine_extras", "engine_args")


class BadDeploy(PlanError):
    """A deploy file is unreadable or invalid; the message names the file and the key."""


class DeployStage(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    kind: Kind
    gpus: tuple[int, ...]
    #: Numbers of processes that divide its heads, and its layers.
    shards: int
    pipeline: int = 1
    ours: bool
    #: Settings for offloading. `stays`: they switch offloading off.
    offload: OffloadSettings
    stays: bool
    utilization: float | None
    kv_cache_bytes: int | None
    #: Tokens of the longest request, of a KV cache block, and of a step.
    max_model_len: int | None = None
    block_tokens: int | None = None
    step_tokens: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_requests: int | None = None
    caches_prefixes: bool = True
    drafts: bool = False
    #: Treatment of its KV cache between turns, and the config that sets it.
    kv: str = "private"
    additional: Mapping[str, Any] = {}
    graphs: bool

    @property
    def has_components(self) -> bool:
        return self.ours or KEY in self.additional


class Deploy(msgspec.Struct, frozen=True):
    path: Path
    stages: tuple[DeployStage, ...]
    async_chunk: bool
    #: The file's own keys, and these merged with the base's.
    own: dict[str, Any]
    whole: dict[str, Any]

    @property
    def has_components(self) -> bool:
        return any(stage.has_components for stage in self.stages)


def read(
    path: Path, own: dict[str, Any] | None = None, installed: VllmOmni | None = None
) -> Deploy:
    """Read the stages of a deploy file. Needs PyYAML. Raises: BadDeploy, PlanError.

    `own`: the keys of a file that does not exist yet. `installed`: the vLLM-Omni with base files
    and pipelines, if not that of this Python. Blocks for half a minute if vLLM-Omni must be asked
    for the name or kind of a stage.
    """
    installed = installed or omni.of_this_python()
    own = _loaded(path) if own is None else own
    if "base_config" in own:
        own = {**own, "base_config": str(_base(path, own["base_config"], installed))}
    files = _with_bases(path, own, installed)
    whole = reduce(_over, reversed(files.values()))
    merged = _for_cuda(whole)
    stages = _stages(path, merged, files, installed)
    _check_unique(path, stages)
    at_once = any(stage.get("async_chunk") is not False for stage in merged["stages"])
    together = len(stages) > 1 and bool(merged.get("async_chunk", True)) and at_once
    return Deploy(path, stages, together, own, whole)


def _stages(
    path: Path, merged: dict[str, Any], files: Iterable[Path], installed: VllmOmni | None
) -> tuple[DeployStage, ...]:
    listed = merged.get("stages")
    if not isinstance(listed, list) or not listed:
        raise BadDeploy(f"{path} lists no stages, under stages")
    stages = tuple(_stage(path, entry, merged, None) for entry in listed)
    if installed is not None and not all(
        one.ours and options_of(one.additional, "").component for one in stages
    ):
        known = installed.stages_of(merged.get("pipeline"), [file.name for file in files])
        stages = tuple(_stage(path, each, merged, known.get(each["stage_id"])) for each in listed)
    return stages


def _check_unique(path: Path, stages: Sequence[DeployStage]) -> None:
    ids = [stage.id for stage in stages]
    if len(set(ids)) < len(ids):
        raise BadDeploy(f"{path}: several stages have one stage_id; they are {ids}")
    names = Counter(stage.name for stage in stages)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise BadDeploy(f"{path}: several stages are called {', '.join(twice)}")


def cuda_stages(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(((of.get("platforms") or {}).get("cuda") or {}).get("stages") or ())


def _loaded(path: Path) -> dict[str, Any]:
    found = mapping(read_yaml, path, BadDeploy, "is no deploy file: it has no keys")
    where = str(path)
    for key in ("base_config", "pipeline"):
        _text(where, found, key)
    _check_stages(where, _keyed(where, found).get("stages"))
    platforms = _dictionary(where, "platforms", found.get("platforms"))
    cuda = _dictionary(where, "platforms: cuda", platforms.get("cuda"))
    _check_stages(f"{where}: platforms: cuda", cuda.get("stages"))
    return found


def _check_stages(where: str, listed: object) -> None:
    if not isinstance(listed, list | None):
        raise BadDeploy(f"{where}: stages is not a list: {listed!r}")
    for stage in listed or ():
        number = stage.get("stage_id") if isinstance(stage, dict) else None
        if type(number) is not int or not 0 <= number < _STAGES_MAX:
            raise BadDeploy(f"{where}: each of its stages needs a stage_id, a number")
        _keyed(f"{where}: stage {number}", stage)


def _keyed(where: str, found: dict[Any, Any]) -> dict[str, Any]:
    for key in found:
        if not isinstance(key, str):
            raise BadDeploy(f"{where}: {key!r} is not a key: it is not text")
    return found


def _base(path: Path, named: object, installed: VllmOmni | None) -> Path:
    beside = path.parent / str(named)
    if beside.is_file():
        return beside.resolve()
    absent = "no vllm_omni is installed"
    if installed is not None:
        shipped = installed.folder / "deploy" / str(named)
        if PurePath(str(named)).name == named and shipped.is_file():
            return shipped.resolve()
        absent = "the installed vllm_omni has none of that name"
    raise BadDeploy(f"{path}: its base_config {named} is not beside it, and {absent}")


def _with_bases(
    path: Path, own: dict[str, Any], installed: VllmOmni | None
) -> dict[Path, dict[str, Any]]:
    files, seen = {path: own}, {path.resolve()}
    while "base_config" in own:
        if len(files) > _BASES_MAX:
            raise BadDeploy(f"{path}: more than {_BASES_MAX} files are based on each other")
        found = _base(path, own["base_config"], installed)
        if found in seen:
            raise BadDeploy(f"{path}: its base_config {found} is based on it in turn")
        path, own = found, _loaded(found)
        files[path] = own
        seen.add(path)
    return files


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **{k: v for k, v in own.items() if k != "base_config"}}
    merged["stages"] = _merged(base.get("stages"), own.get("stages"))
    merged["platforms"] = {**(base.get("platforms") or {}), **(own.get("platforms") or {})}
    merged["platforms"]["cuda"] = {"stages": _merged(cuda_stages(base), cuda_stages(own))}
    return merged


def _merged(base: list[Any] | None, over: list[Any] | None) -> list[dict[str, Any]]:
    by_id: dict[int, dict[str, Any]] = {s["stage_id"]: s for s in base or ()}
    for stage in over or ():
        before = by_id.get(stage["stage_id"], {})
        both = {
            key: {**before[key], **stage[key]}
            for key in _MERGED
            if isinstance(before.get(key), dict) and isinstance(stage.get(key), dict)
        }
        by_id[stage["stage_id"]] = {**before, **stage, **both}
    return list(by_id.values())


def _for_cuda(merged: dict[str, Any]) -> dict[str, Any]:
    ids = {s["stage_id"] for s in merged.get("stages") or ()}
    known = [s for s in cuda_stages(merged) if s["stage_id"] in ids]
    return {**merged, "stages": _merged(merged.get("stages"), known)} if known else merged


def _stage(
    path: Path, entry: dict[str, Any], deploy: Mapping[str, Any], known: tuple[str, Kind] | None
) -> DeployStage:
    number = entry["stage_id"]
    where = f"{path}: stage {number}"
    flat = {**deploy, **entry}
    for inner in INNER:
        flat |= _dictionary(where, inner, entry.get(inner))
    additional = _dictionary(where, "additional_config", flat.get("additional_config"))
    worker, extension = str(flat.get("worker_cls")), str(flat.get("worker_extension_cls"))
    try:
        own = extension.startswith(_OURS)
        options = options_of_stage(flat, where) if own else options_of(additional, where)
    except InvalidArgument as exc:
        raise BadDeploy(str(exc)) from exc
    called, kind = known or (f"stage{number}", _kind(worker, extension))
    name = options.component or called
    if problem := problem_with_text("component", name):
        raise BadDeploy(f"{where}: {problem}")
    ours = own or worker.startswith(_OURS)
    gpus, shards, pipeline = _placed(where, flat, strictly=ours and kind != "diffusion")
    return DeployStage(
        id=number,
        name=name,
        kind=kind,
        gpus=gpus,
        shards=shards,
        pipeline=pipeline,
        ours=ours,
        offload=options.offload,
        stays=options.offload_said and options.offload.mode == "off",
        utilization=_number(where, flat, "gpu_memory_utilization", float, 1.0),
        kv_cache_bytes=_number(where, flat, "kv_cache_memory_bytes", int, _BYTES_MAX),
        max_model_len=_tokens(where, flat, "max_model_len"),
        block_tokens=_tokens(where, flat, "block_size"),
        step_tokens=_tokens(where, flat, "max_num_batched_tokens"),
        dtype=_text(where, flat, "dtype"),
        kv_cache_dtype=_text(where, flat, "kv_cache_dtype"),
        max_requests=_number(where, flat, "max_num_seqs", int, _TOKENS_MAX),
        caches_prefixes=flat.get("enable_prefix_caching") is not False,
        drafts=bool(flat.get("speculative_config")),
        kv=options.kv,
        additional=additional,
        graphs=_has_graphs(flat),
    )


def _kind(worker: str, extension: str) -> Kind:
    if extension.startswith(_OURS):
        return "diffusion"
    return "generation" if "Generation" in worker else "ar"


def _placed(
    where: str, flat: Mapping[str, Any], *, strictly: bool
) -> tuple[tuple[int, ...], int, int]:
    """Return the GPU of each process, and the numbers of processes that divide heads and layers.

    Not `strictly`: the stage may also use other kinds of parallelism.
    """
    shards = _processes(where, flat, "tensor_parallel_size")
    pipeline = _processes(where, flat, "pipeline_parallel_size") if strictly else 1
    each = shards * pipeline
    replicas = _processes(where, flat, "num_replicas")
    devices = flat.get("devices")
    listed = tuple(range(each) if devices is None else _gpus(where, devices))
    if not strictly:
        return listed, shards, 1
    if _processes(where, flat, "data_parallel_size") > 1:
        raise BadDeploy(
            f"{where}: data_parallel_size is {flat['data_parallel_size']}; with swapd's worker it "
            "has to be 1. Divide the stage by tensor_parallel_size or pipeline_parallel_size"
        )
    if len(set(listed)) < len(listed):
        raise BadDeploy(
            f"{where}: devices {devices!r} names a GPU twice; each process of a stage needs its own"
        )
    if len(listed) == each:  # of one replica; the others use the following GPUs
        listed = tuple(r * each + gpu for r in range(replicas) for gpu in listed)
    if len(listed) == each * replicas:
        return listed, shards, pipeline
    raise BadDeploy(
        f"{where}: it has {len(listed)} devices for {each * replicas} processes "
        "(tensor_parallel_size times pipeline_parallel_size times num_replicas)"
    )


def _processes(where: str, flat: Mapping[str, Any], key: str) -> int:
    return _number(where, flat, key, int, _PROCESSES_MAX) or 1


def _gpus(where: str, devices: object) -> list[int]:
    listed = devices if isinstance(devices, list) else str(devices).split(",")
    try:
        numbers = [int(d) for d in listed]
        if not all(0 <= number < _PROCESSES_MAX for number in numbers):
            raise ValueError("no machine has so many")
        return numbers
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadDeploy(
            f'{where}: devices {devices!r} names no GPUs; write them like "0,1"'
        ) from exc


def _has_graphs(flat: Mapping[str, Any]) -> bool:
    compilation = flat.get("compilation_config")
    said = compilation.get("cudagraph_mode") if isinstance(compilation, dict) else None
    without = said is not None and str(said).upper() in ("NONE", "0")
    return not (flat.get("enforce_eager") or without)


def _dictionary(where: str, key: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadDeploy(f"{where}: {key} has no keys; it is {value!r}")
    return value


def _tokens(where: str, flat: Mapping[str, Any], key: str) -> int | None:
    return None if flat.get(key) == -1 else _number(where, flat, key, int, _TOKENS_MAX)


def _text(where: str, flat: Mapping[str, Any], key: str) -> str | None:
    value = flat.get(key)
    if not isinstance(value, str | None):
        raise BadDeploy(f"{where}: {key} is not text: {value!r}")
    return value


def _number(where: str, flat: Mapping[str, Any], key: str, kind: type, most: float) -> Any | None:
    value = flat.get(key)
    if value is None:
        return None
    wanted = (int, float) if kind is float else int
    if not isinstance(value, wanted) or isinstance(value, bool) or not 0 < value <= most:
        raise BadDeploy(
            f"{where}: {key} must be a number above 0 and at most {most:g}; it is {value!r}"
        )
    return kind(value)
