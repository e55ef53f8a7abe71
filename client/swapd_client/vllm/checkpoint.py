"""The bytes of weights that a stage will load, by its files.

Imports neither torch nor vLLM: `swapd plan` uses it.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from swapd.shared.documents import read_json
from swapd_client.errors import InvalidSource
from swapd_client.log import log
from swapd_client.weights import safetensors
from swapd_client.weights.safetensors import CAST, StoredTensor

#: Tensor prefixes in the files of stages whose tensors do not all begin with the stage's name.
_PREFIXES = {"code2wav": ("code2wav.", "token2wav.")}
#: Tensors of other stages that a stage loads too, by `model_type` in config.json and the stage.
BORROWED = {("qwen2_5_omni", "talker"): ("thinker.model.embed_tokens",)}


def folder_of(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the folder of a model; None: it is an id that is not in Hugging Face's cache.

    `revision`: of an id. `cache`: the cache in place of the usual one.
    """
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def folder_in(config: Any, model: Any = None) -> Path | None:
    """Return the folder of the model in vLLM's configuration, as `folder_of`.

    `model`: the configuration of another of its models.
    """
    model = model or config.model_config
    return folder_of(model.model, model.revision, config.load_config.download_dir)


def nbytes_of(folder: Path, stage: str, item_bytes: int = 0) -> int | None:
    """Return the bytes of a stage's tensors, with borrowed ones; of all if none has its prefix.

    None: unknown. `item_bytes`: size of the model's dtype, to which vLLM casts floats.
    """
    try:
        with safetensors.open_all(folder) as found:
            tensors = found
    except InvalidSource as exc:
        log.debug("the bytes that %s loads are unknown: %s", stage or folder, exc)
        return None
    cast = CAST if item_bytes else ()
    return sum(
        prod(one.shape) * item_bytes if one.dtype in cast else one.nbytes
        for one in _of_stage(tensors, folder, stage)
    )


def _of_stage(tensors: Mapping[str, StoredTensor], folder: Path, stage: str) -> list[StoredTensor]:
    if not any(name.startswith(prefixes_of("", stage)) for name in tensors):
        return list(tensors.values())
    prefixes = prefixes_of(_type_of(folder), stage)
    return [one for name, one in tensors.items() if name.startswith(prefixes)]


def prefixes_of(model_type: str, stage: str) -> tuple[str, ...]:
    borrowed = (f"{name}." for name in BORROWED.get((model_type, stage), ()))
    return (*_PREFIXES.get(stage, (f"{stage}.",)), *borrowed)


def _type_of(folder: Path) -> str:
    with suppress(OSError, ValueError):
        config = read_json(folder / "config.json")
        return str(config.get("model_type")) if isinstance(config, dict) else ""
    return ""
