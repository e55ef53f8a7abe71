"""The offloading settings of vLLM and vLLM-Omni, under the names that their users know.

They come from keyword arguments, a stage file in YAML, or the command line. `strategy.py` turns
them into policies.

Three switches choose how a model's components share the device: `cpu_offload_enabled`, which
excludes the others, `enable_cpu_offload`, and `enable_layerwise_offload`, which wins over the
second. `cpu_offload_gb` is a switch of its own, and works with each of them.
`cpu_offload_components` narrows the active switch. Without a switch, other settings offload
nothing.
"""

import argparse
import os
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from swapd.shared.config import flag
from swapd.shared.documents import BadDocument, read_yaml
from swapd.shared.text import meant
from swapd_client.errors import InvalidArgument

_GIB = 1 << 30

Strategy = Literal["alternating", "sequential"]
Mode = Literal["off", "alternating", "sequential", "model", "layerwise", "partial"]


class SettingsWarning(UserWarning):
    """Settings that have less effect than they promise."""


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The components to offload, and how. By default, nothing is offloaded."""

    cpu_offload_enabled: Annotated[
        bool, Meta(description="Let swapd load and evict the model's components, on demand")
    ] = False
    cpu_offload_components: Annotated[
        tuple[str, ...] | None,
        Meta(description="Which: names or patterns, as in thinker,visual.*; default: all found"),
    ] = None
    cpu_offload_strategy: Annotated[
        Strategy,
        Meta(
            description="alternating: one member on the device at a time; "
            "sequential: loaded on demand, dropped after use"
        ),
    ] = "alternating"
    cpu_offload_pin_memory: Annotated[
        bool,
        Meta(description="Host copies are pinned, by the daemon: its --pin-limit says how much"),
    ] = True
    enable_cpu_offload: Annotated[
        bool, Meta(description="DiTs and encoders exclude each other on the device, the VAE stays")
    ] = False
    enable_layerwise_offload: Annotated[
        bool, Meta(description="Stream DiTs block by block; wins over enable_cpu_offload")
    ] = False
    cpu_offload_gb: Annotated[
        float, Meta(description="GiB of a component's weights that stay on the host", ge=0)
    ] = 0.0

    def __post_init__(self) -> None:
        """Raise InvalidArgument if settings contradict each other."""
        if self.cpu_offload_components is not None and not self.cpu_offload_components:
            raise InvalidArgument(
                "cpu_offload_components is empty; leave it out to offload all components found"
            )
        if not isfinite(self.cpu_offload_gb * _GIB):
            raise InvalidArgument(f"cpu_offload_gb: {self.cpu_offload_gb} is not a size")
        switches = ("enable_layerwise_offload", "enable_cpu_offload")
        other = next((name for name in switches if getattr(self, name)), None)
        if other and self.cpu_offload_enabled:
            raise InvalidArgument(
                f"cpu_offload_enabled and {other} each say how components share the device; "
                "set one of them"
            )
        if other and self.cpu_offload_strategy != "alternating":
            raise InvalidArgument(
                f"cpu_offload_strategy goes with cpu_offload_enabled; {other} has its own"
            )
        self._warn_of_idle_ones()

    def _warn_of_idle_ones(self) -> None:
        if self.enable_cpu_offload and self.enable_layerwise_offload:
            _warn("enable_layerwise_offload is set too, so enable_cpu_offload is ignored")
        if not self.cpu_offload_pin_memory:
            _warn(
                "cpu_offload_pin_memory=False changes nothing here: host copies belong to the "
                "daemon, which pins them; to pin fewer, or none, start it with --pin-limit"
            )

    @property
    def mode(self) -> Mode:
        """The combined effect of the switches. "partial" is `cpu_offload_gb` alone."""
        if self.enable_layerwise_offload:
            return "layerwise"
        if self.enable_cpu_offload:
            return "model"
        if self.cpu_offload_enabled:
            return self.cpu_offload_strategy
        return "partial" if self.cpu_offload_gb else "off"

    @property
    def offloaded_bytes(self) -> int:
        return int(self.cpu_offload_gb * _GIB)


NAMES = OffloadSettings.__struct_fields__
_KINDS = get_type_hints(OffloadSettings, include_extras=True)
#: Keys that describe the stage itself.
_NO_SETTINGS = ("stage_id", "engine_args", "additional_config", "model_stage", "model_arch")
#: Similarity (of 1) from which a key counts as a misspelt setting.
_NEARLY = 0.9
_FORMER = {"dit_cpu_offload": "enable_cpu_offload"}


def from_keywords(**given: Any) -> OffloadSettings:
    """Return the given settings; None stands for the default.

    Raises: InvalidArgument, naming a setting that is misspelt, of the wrong type, or contradictory.
    """
    for name in given:
        check_name(name, name)
    parsed = {n: _parsed(n, value, n) for n, value in given.items() if value is not None}
    return OffloadSettings(**parsed)


# --- stage files -------------------------------------------------------------------------


def from_yaml(path: str | os.PathLike[str], stage: int | str | None = None) -> OffloadSettings:
    """Return the settings of one stage in a stage file of vLLM-Omni. Needs PyYAML.

    Stages are listed under `stage_args`, with the settings in each one's `engine_args`, or under
    `stages`, with the settings in the stage itself or in its `additional_config: {swapd: ...}`.
    `stage` is a `stage_id`, a `model_stage` or a `component`; it may be left out if the file has
    one stage only. Keys that are no offloading settings are ignored; a misspelt offloading setting
    is an error in any stage of the file.

    Raises: InvalidArgument, naming file, stage and key.
    """
    stages = _listed(Path(path), _read(Path(path)))
    where, settings = _chosen(Path(path), stages, stage)
    try:
        return OffloadSettings(**settings)
    except InvalidArgument as exc:
        raise InvalidArgument(f"{where}: {exc}") from exc


class StageSettings(msgspec.Struct, frozen=True):
    where: str
    id: object
    model_stage: str | None
    #: The offloading settings; and the names of all others.
    settings: dict[str, Any]
    others: list[str]

    def __str__(self) -> str:
        named = f" ({self.model_stage})" if self.model_stage else ""
        return f"{'?' if self.id is None else self.id}{named}"


def in_stage_args(path: Path) -> list[StageSettings]:
    """Return the stages that a file lists under `stage_args`, if any. Raises: InvalidArgument."""
    raw = _read(path)
    return _listed(path, raw) if isinstance(raw, dict) and "stage_args" in raw else []


def _listed(path: Path, raw: object) -> list[StageSettings]:
    listed = raw.get("stage_args", raw.get("stages")) if isinstance(raw, dict) else None
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument(f"{path}: lists no stages, under stage_args or stages")
    return [_stage(path, number, entry) for number, entry in enumerate(listed)]


def _stage(path: Path, number: int, entry: object) -> StageSettings:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{path}: stage number {number + 1} of the list has no settings")
    engine = _inner(path, entry, "engine_args")
    both = {**entry, **engine, **_inner(path, _inner(path, entry, "additional_config"), "swapd")}
    stage_id = entry.get("stage_id")
    model_stage = both.get("model_stage") or both.get("component")
    ours = list(filter(_is_ours, map(str, both)))
    stage = StageSettings(
        where=f"{path}: stage {stage_id if stage_id is not None else f'number {number + 1}'}"
        + (f" ({model_stage})" if model_stage else ""),
        id=stage_id,
        model_stage=model_stage,
        settings={},
        others=[name for name in map(str, both) if name not in (*ours, *_NO_SETTINGS)],
    )
    for name in ours:
        check_name(name, f"{stage.where}: {name}")
        if both[name] is not None:
            stage.settings[name] = _parsed(name, both[name], f"{stage.where}: {name}")
    return stage


def _inner(path: Path, entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = entry.get(key) or {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path}: stage {entry.get('stage_id')}: {key} has no settings")
    return found


def _read(path: Path) -> object:
    try:
        return read_yaml(path)
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror}") from exc
    except BadDocument as exc:
        raise InvalidArgument(f"{path}: {exc}") from exc


def _chosen(
    path: Path, stages: list[StageSettings], wanted: int | str | None
) -> tuple[str, dict[str, Any]]:
    found = [s for s in stages if wanted is None or str(wanted) in (str(s.id), s.model_stage)]
    if len(found) == 1:
        return found[0].where, found[0].settings
    listed = ", ".join(map(str, stages))
    if wanted is None:
        raise InvalidArgument(f"{path} has several stages; say which, by id or name: {listed}")
    problem = "has no stage" if not found else "has several stages"
    raise InvalidArgument(f"{path} {problem} {wanted!r}; there are: {listed}")


def _is_ours(key: str) -> bool:
    if "cpu_offload" in key or (key.startswith("enable") and "offload" in key):
        return True
    return bool(get_close_matches(key, NAMES, n=1, cutoff=_NEARLY))


# --- the command line --------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = NAMES) -> None:
    """Give `parser` an option for each of `names` that it does not have yet."""
    group = parser.add_argument_group("offloading")
    for name in names:
        kind = _KINDS[name]
        option = flag(name)
        options: dict[str, Any] = {"dest": name, "default": None, "help": _described(kind)}
        if name == "cpu_offload_pin_memory":
            option = "--no-cpu-offload-pin-memory"
            options |= {"action": "store_false", "help": f"Do not ask for it. {_described(kind)}"}
        elif get_args(kind)[0] is bool:
            options |= {"action": "store_true"}
        elif name == "cpu_offload_strategy":
            options |= {"choices": get_args(Strategy)}
        elif name == "cpu_offload_gb":
            options |= {"type": float, "metavar": "GIB"}
        else:
            options |= {"metavar": "NAMES"}
        try:
            group.add_argument(option, **options)
        except argparse.ArgumentError:
            continue


def from_arguments(parsed: argparse.Namespace) -> OffloadSettings:
    """Raises: InvalidArgument, naming the option."""
    given = {name: getattr(parsed, name, None) for name in NAMES}
    return OffloadSettings(**{n: _parsed(n, v, flag(n)) for n, v in given.items() if v is not None})


# --- one value, one struct ---------------------------------------------------------------


def check_name(name: str, source: str) -> None:
    """Raise InvalidArgument, with a suggestion, unless `name` is a setting."""
    if name not in NAMES:
        hint = meant(_FORMER.get(name, name), NAMES, "settings are")
        raise InvalidArgument(f"{source} is not a setting; {hint}")


def _parsed(name: str, value: Any, source: str) -> Any:
    if name == "cpu_offload_components":
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif isinstance(value, Iterable) and not isinstance(value, Mapping):
            value = list(value)
    try:
        return msgspec.convert(value, _KINDS[name])
    except msgspec.ValidationError as exc:
        choices = get_args(Strategy) if name == "cpu_offload_strategy" else ()
        problem = f"give one of {', '.join(choices)}" if choices else exc
        raise InvalidArgument(f"{source}: {problem}; it is {value!r}") from exc


def _described(kind: Any) -> str:
    meta: Meta = get_args(kind)[1]
    return (meta.description or "").replace("%", "%%")


def _warn(text: str) -> None:
    warnings.warn(text, SettingsWarning, stacklevel=3)
