"""The bytes of weights that a stage will load, if its files tell it beforehand."""

import logging
from math import prod
from pathlib import Path

from swapd_client.errors import InvalidSource
from swapd_client.weights import safetensors
from swapd_client.weights.safetensors import Stored

log = logging.getLogger("swapd_client")

#: Stages whose tensors have other prefixes in the files.
_PREFIXES = {"code2wav": ("code2wav.", "token2wav.")}


def nbytes_of(model: str, stage: str) -> int | None:
    """The bytes of a stage's tensors in its files; None if unknown. See `tensors_of`."""
    tensors = tensors_of(model, stage)
    return None if tensors is None else sum(one.nbytes for one in tensors)


def loaded_bytes(model: str, stage: str, item_bytes: int) -> int | None:
    """As `nbytes_of`, with floating-point tensors cast to items of `item_bytes` if that is less."""
    tensors = tensors_of(model, stage)
    if tensors is None:
        return None
    return sum(prod(one.shape) * min(_item_bytes(one, item_bytes)) for one in tensors)


def _item_bytes(stored: Stored, item_bytes: int) -> tuple[int, int]:
    stored_as = safetensors.ITEM_BYTES[stored.dtype]
    return stored_as, item_bytes if "F" in stored.dtype else stored_as


def tensors_of(model: str, stage: str) -> list[Stored] | None:
    """A stage's tensors: those that begin with its name, else all; None if unknown."""
    folder = Path(model) if Path(model).is_dir() else _cached(model)
    if folder is None:
        return None
    try:
        files, tensors = safetensors.open_all(folder)
    except InvalidSource as exc:
        log.debug("the bytes that %s loads are unknown: %s", stage or model, exc)
        return None
    for file in files:
        file.close()
    prefixes = _PREFIXES.get(stage, (f"{stage}.",))
    named = [one for name, one in tensors.items() if name.startswith(prefixes)]
    return named or list(tensors.values())


def _cached(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None
