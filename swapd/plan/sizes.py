"""Finds the sizes of a model's components, from its files or from a running daemon.

No weights are read: the header of a safetensors file has the sizes of its tensors.
"""

import logging
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from swapd.plan import hub
from swapd.plan.advice import ModelComponent, PlanError
from swapd.shared import config
from swapd.shared.documents import mapping, read_json
from swapd.shared.protocol import ComponentStatus, rest_of
from swapd.shared.text import problem_with_text
from swapd.shared.units import typed_size
from swapd_client.errors import InvalidSource
from swapd_client.weights.safetensors import open_all

#: Parts of a model that run as stages.
STAGES = ("thinker", "talker", "code2wav", "token2wav")
#: Denoisers of a pipeline.
DITS = ("transformer", "transformer_2", "dit", "unet")
COMPONENTS = (
    *STAGES,
    *(*DITS, "vae", "image_encoder"),
    *("text_encoder", "text_encoder_2", "text_encoder_3", "visual", "audio_tower"),
)

#: Default passes over the weights in a request: denoising steps, tokens.
TYPICAL_PASSES = {
    **dict.fromkeys(DITS, 20),
    **dict.fromkeys(("thinker", "talker", "language_model"), 100),
}

#: Most layers, experts and the like: building a larger model takes hours.
_COUNT_MAX = 10_000
_COUNTS = re.compile("layer|block|depth|expert|stage")
_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d+-of-\d+(?=$|\.)")
_BITS = re.compile(r"\d+")


class NoSizes(PlanError):
    """The size is unknown; the message has the alternatives."""


def named(text: str) -> ModelComponent | None:
    """Parse a text like `dit=40GiB`; return None for a path. Raises: NoSizes."""
    name, equals, nbytes = text.partition("=")
    if not equals or not name or Path(text).exists():
        return None
    try:
        given = typed_size(nbytes)
    except ValueError as exc:
        raise NoSizes(f"{text}: {exc}") from exc
    if not given:
        raise NoSizes(f"{text}: a component of no bytes needs no plan")
    return ModelComponent(name, given)


def of_path(path: Path) -> list[ModelComponent]:
    """`path`: a file or folder of safetensors, or a config. Raises: NoSizes."""
    if path.is_dir():
        return _of_folder(path)
    if path.name.endswith(_INDEX):
        return _of_tensors(_stored(path), _called(path.parent))
    if path.suffix == ".safetensors":
        return _of_tensors(_stored(path), path.stem)
    if path.name == "model_index.json":
        return _of_pipeline(path.parent)
    if path.suffix == ".json":
        return _of_config(path)
    if path.exists():
        raise NoSizes(f"{path} is neither safetensors nor a config; or give NAME=SIZE")
    raise NoSizes(
        f"{path} does not exist; give a file or folder of safetensors, a config.json, the id of a "
        f"model in the cache of Hugging Face ({config.hub_cache()}), or NAME=SIZE, as in dit=40GiB"
    )


def found(source: str) -> Path:
    """`source`: a path, or the id of a model in the cache."""
    path = Path(source)
    return path if path.exists() else hub.cached(source) or path


def config_of(path: Path) -> Mapping[str, Any]:
    return _json(path / "config.json" if path.is_dir() else path)


def within(path: Path, names: Iterable[str]) -> list[ModelComponent]:
    wanted = list(names)
    if not wanted or path.suffix == ".json":
        return []
    tensors = _tensors_in(path) if path.is_dir() else _stored(path)
    found = {n: [b for t, b in tensors.items() if t.startswith(f"{n}.")] for n in wanted}
    return [ModelComponent(name, sum(of)) for name, of in found.items() if sum(of)]


def of_daemon(status: Iterable[ComponentStatus]) -> list[ModelComponent]:
    """Return the daemon's components; the parts of a family become its blocks."""
    families: dict[str, dict[str, int]] = {}
    for c in status:
        if c.kind != "workspace":
            families.setdefault(c.part_of or c.name, {})[c.name] = c.nbytes
    found = []
    for name, parts in families.items():
        blocks = [nbytes for part, nbytes in parts.items() if part not in (name, rest_of(name))]
        if total := sum(parts.values()):
            found.append(_in_blocks(name, total, blocks))
    return found


def _in_blocks(name: str, total: int, blocks: Collection[int]) -> ModelComponent:
    if len(blocks) < 2:
        return ModelComponent(name, total)
    return ModelComponent(name, total, len(blocks), max(blocks), total - sum(blocks))


def check_names(found: Iterable[ModelComponent], sources: Iterable[str]) -> None:
    """Raise PlanError unless names are unique, and possible in settings.

    `sources`: the words of the command line that give sizes.
    """
    names = Counter(c.name for c in found)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise PlanError(f"several components are called {twice}: {_why(twice, sources)}")
    for name in names:
        if problem := problem_with_text("the name of a component", name):
            raise PlanError(problem)


def _why(twice: str, sources: Iterable[str]) -> str:
    given = [source for source in sources if source.startswith(f"{twice}=") and named(source)]
    if not given:
        return "plan them one by one"
    return (
        f"{given[0]} is one more size of its weights. If it belongs to an option, write the option "
        f"before each of its values, as in --room {given[0]}"
    )


# --- folders -----------------------------------------------------------------------------


def _of_folder(folder: Path) -> list[ModelComponent]:
    if (folder / "model_index.json").exists():
        return _of_pipeline(folder)
    if checkpoints := _checkpoints_in(folder):
        return [c for name, tensors in checkpoints.items() for c in _of_tensors(tensors, name)]
    if (folder / "config.json").exists():
        return _of_config(folder / "config.json")
    raise NoSizes(f"{folder} has neither safetensors, nor a model_index.json, nor a config.json")


def _of_pipeline(folder: Path) -> list[ModelComponent]:
    index = folder / "model_index.json"
    found = []
    for name, entry in _json(index).items():
        if not isinstance(entry, list):
            continue
        if not name.isprintable() or PurePath(name).name != name or name in ("", ".."):
            raise NoSizes(f"{index} names {name!r}, which is not a file beside it")
        if weights := _tensors_in(folder / name):
            found.append(_component(name, weights))
    if not found:
        raise NoSizes(f"{folder} has a model_index.json, but no folder of it has safetensors")
    return found


def _tensors_in(folder: Path) -> dict[str, int]:
    checkpoints = _checkpoints_in(folder)
    if len(checkpoints) > 1:
        raise NoSizes(
            f"{folder} has several checkpoints, {', '.join(checkpoints)}: give one file, such as "
            f"{folder / next(iter(checkpoints))}.safetensors"
        )
    return next(iter(checkpoints.values()), {})


def _checkpoints_in(folder: Path) -> dict[str, dict[str, int]]:
    """Return the tensors of each model in `folder`, by its name, and of one variant each.

    Files without a common tensor are one model. Otherwise each file is a model of its own, but
    shards (`model-00001-of-00002`) always are one model.
    """
    indices = _by_stem(folder, _INDEX)
    if indices:
        found = {stem: _stored(paths[0]) for stem, paths in indices.items()}
    else:
        files = _by_stem(folder, ".safetensors")
        found = {stem: _together(map(_stored, paths)) for stem, paths in files.items()}
    merged = _together(found.values())
    if len(merged) == sum(map(len, found.values())):
        return {_called(folder): merged} if merged else {}
    return found


def _by_stem(folder: Path, suffix: str) -> dict[str, list[Path]]:
    """Group files by the names of their models. model.fp16.safetensors beside model.safetensors is
    a variant, which is left out."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"*{suffix}"), key=lambda p: (len(p.name), p.name)):
        found.setdefault(_SHARD.sub("", path.name.removesuffix(suffix)), []).append(path)
    return {stem: paths for stem, paths in found.items() if stem.rpartition(".")[0] not in found}


def _together(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: nbytes for part in parts for name, nbytes in part.items()}


def _called(folder: Path) -> str:
    return hub.called(folder.resolve()) or "model"


# --- files -------------------------------------------------------------------------------


def _stored(path: Path) -> dict[str, int]:
    try:
        with open_all(path) as tensors:
            found = {name: tensor.nbytes for name, tensor in tensors.items()}
    except InvalidSource as exc:
        raise NoSizes(str(exc)) from exc
    if not found:
        raise NoSizes(f"{path} lists no tensors")
    return found


def _json(path: Path) -> dict[str, Any]:
    return mapping(read_json, path, NoSizes, "describes no model")


# --- tensors by their names --------------------------------------------------------------


def _of_tensors(tensors: Mapping[str, int], name: str) -> list[ModelComponent]:
    parts: dict[str, dict[str, int]] = {}
    for tensor, nbytes in tensors.items():
        top = tensor.partition(".")[0]
        parts.setdefault(top if top in COMPONENTS else name, {})[tensor] = nbytes
    return [_component(part, of) for part, of in parts.items() if sum(of.values())]


def _component(name: str, tensors: Mapping[str, int]) -> ModelComponent:
    blocks: dict[tuple[str, str], int] = {}
    for tensor, nbytes in tensors.items():
        if numbered := _NUMBERED.match(tensor):
            key = numbered.group(1), numbered.group(2)
            blocks[key] = blocks.get(key, 0) + nbytes
    total = sum(tensors.values())
    are_most = 2 * sum(blocks.values()) >= total
    return _in_blocks(name, total, blocks.values() if are_most else ())


# --- configs -----------------------------------------------------------------------------


def _of_config(path: Path) -> list[ModelComponent]:
    config = _json(path)
    architecture = _architecture(path, config)
    if too_many := _too_many(config):
        raise NoSizes(f"{path}: {too_many} is more than any model has; give NAME=SIZE")
    try:
        import torch
        import transformers
    except ModuleNotFoundError as exc:
        raise NoSizes(
            f"{path}: {exc.name} is needed to build a model from its config: "
            "pip install 'swapd[demo]', or give NAME=SIZE"
        ) from exc
    try:
        with _unheard(), torch.device("meta"):
            kind = getattr(transformers, architecture, None)
            model = kind and kind(kind.config_class.from_json_file(path))
    except Exception as exc:  # a config may raise any error
        raise NoSizes(f"{path}: {architecture} cannot be built from it: {exc}") from exc
    if model is None:
        raise NoSizes(f"{path}: transformers has no {architecture}; give NAME=SIZE")
    item = _item_bytes(config) or 2
    tensors = {name: t.numel() * item for name, t in model.named_parameters()}
    return _of_tensors(tensors, _called(path.parent))


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not any(named):
        raise NoSizes(f"{path} names no architecture; give its safetensors, or NAME=SIZE")
    if not isinstance(named[0], str) or not named[0].isidentifier():
        raise NoSizes(f"{path}: {named[0]!r} is no architecture; give NAME=SIZE")
    return named[0]


@contextmanager
def _unheard() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _item_bytes(config: Mapping[str, Any]) -> int | None:
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            bits = _BITS.search(value[:20])
            return min(max(int(bits[0]) // 8, 1), 8) if bits else 2
    inner = (_item_bytes(v) for v in config.values() if isinstance(v, dict))
    return next(filter(None, inner), None)


def _too_many(config: Mapping[str, Any]) -> str:
    for key, value in config.items():
        if isinstance(value, dict) and (inner := _too_many(value)):
            return inner
        if isinstance(value, int) and value > _COUNT_MAX and _COUNTS.search(key):
            return f"{key}={value}"
    return ""
