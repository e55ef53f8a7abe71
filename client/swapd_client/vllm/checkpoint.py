"""The bytes of weights that a stage will load, by its files.

Imports neither torch nor vLLM: `swapd plan` uses it.
"""

from contextlib import suppress
from math import prod
from pathlib import Path

from swapd.shared.documents import read_json
from swapd_client.errors import InvalidSource
from swapd_client.log import log
from swapd_client.weights import safetensors
from swapd_client.weights.safetensors import CAST, Stored

#: Tensor prefixes in the files of stages whose tensors do not all begin with the stage's name.
_PREFIXES = {"code2wav": ("code2wav.", "token2wav.")}
#: Tensors of other stages that a stage loads too, by `model_type` in config.json and the stage.
BORROWED = {("qwen2_5_omni", "talker"): ("thinker.model.embed_tokens",)}


def nbytes_of(model: str, stage: str, item_bytes: int = 0) -> int | None:
    """None: unknown. `item_bytes`: size of the model's dtype, to which vLLM casts floats."""
    if (tensors := tensors_of(model, stage)) is None:
        return None
    cast = CAST if item_bytes else ()
    return sum(prod(one.shape) * item_bytes if one.dtype in cast else one.nbytes for one in tensors)


def tensors_of(model: str, stage: str) -> list[Stored] | None:
    """Return a stage's tensors, with borrowed ones; all if none has its prefix; None if unknown."""
    folder = Path(model) if Path(model).is_dir() else _cached(model)
    if folder is None:
        return None
    try:
        with safetensors.open_all(folder) as found:
            tensors = found
    except InvalidSource as exc:
        log.debug("the bytes that %s loads are unknown: %s", stage or model, exc)
        return None
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


def _cached(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None
