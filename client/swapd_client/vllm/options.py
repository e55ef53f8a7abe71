"""Options of a stage in `additional_config.swapd`; deploy/vllm-omni/README.md explains them.

swapd takes over the offloading flags that a diffusion stage sets beside these from vllm-omni, as
its own options of the same names.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from swapd.shared.text import meant
from swapd.shared.units import parse_size
from swapd_client.errors import InvalidArgument
from swapd_client.log import log
from swapd_client.offload import settings
from swapd_client.offload.settings import OffloadSettings

#: Least number of chunks in a part of a stage that is evicted by layers. Half a chunk of each part
#: is empty on average.
PART_CHUNKS = 16

KEY = "swapd"

#: Flags, with the mode and components of a `diffusion_offload_config` that means the same.
_FLAGS: Mapping[str, tuple[str, set[str]]] = {
    "enable_layerwise_offload": ("layer", {"dit"}),
    "enable_cpu_offload": ("module", {"dit", "text_encoder"}),
}
_CONFIG = "diffusion_offload_config"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults apply to a stage without options."""

    #: The stage's name in the daemon; "": as in vllm-omni, or as its model.
    component: str = ""
    #: The daemon's runtime folder; "": `$SWAPD_ENDPOINT`, or that of the rank's GPU.
    endpoint: str = ""
    #: Seconds for requests in flight to finish once another stage waits.
    finish_within_s: Annotated[float, Meta(ge=0)] = 10.0
    #: Seconds of a turn while another stage waits; None: requests in flight finish.
    slice_s: Annotated[float, Meta(gt=0)] | None = None
    #: Bytes of device memory to reserve for loading; None: as many as the stage's files have.
    load_workspace: int | None = None
    #: Names in the daemon of the pipeline's stages; None: vllm-omni's. (): load no stage ahead.
    order: tuple[str, ...] | None = None
    #: "private": the KV cache is not in swapd. "drop": its contents are dropped between two turns,
    #: and a turn lasts until no request is in flight. "auto": swapd saves the blocks of requests in
    #: flight, and with prefix caching those of ended requests. "save": it always saves both.
    kv: Literal["private", "drop", "auto", "save"] = "private"
    #: With `async_chunk`: chunks of a request to make before the stage that consumes them gets its
    #: turn. 0: first finish the requests in flight.
    chunks_per_turn: Annotated[int, Meta(ge=0)] = 32
    #: Whether a stage that dies of an access outside of its turn first names the weights.
    faults: Literal["explain", "silent"] = "explain"
    #: Bytes of weights that stay for a turn, while other layers stream; "auto": as many as fit.
    #: None: all stay, unless another option of `streams` is set.
    resident: int | Literal["auto"] | None = None
    #: Of each `offload_group_size` layers, `offload_num_in_group` stream. 0: none.
    offload_group_size: Annotated[int, Meta(ge=0)] = 0
    offload_num_in_group: Annotated[int, Meta(ge=1)] = 1
    offload: OffloadSettings = OffloadSettings()
    #: Whether `cpu_offload_enabled` is set: false differs from unset.
    offload_said: bool = False

    @property
    def streams(self) -> list[str]:
        """The set options that make layers of an AR or generation stage stream."""
        given = {
            "resident": self.resident is not None,
            "cpu_offload_gb": self.offload.cpu_offload_gb,
            "enable_layerwise_offload": self.offload.enable_layerwise_offload,
            "offload_group_size": self.offload_group_size,
        }
        return [name for name, value in given.items() if value]


_OWN = tuple(n for n in Options.__struct_fields__ if n not in ("offload", "offload_said"))
NAMES = (*_OWN, *settings.NAMES)


def name_of_model(model: str) -> str:
    """Return the name of a stage that has no other; "" if there is no model."""
    return os.path.basename(model and os.path.abspath(model))  # "." has no name


def options_of(
    additional_config: Mapping[str, Any] | None, stage: str, flags: Iterable[str] = ()
) -> Options:
    """Return the options of the stage that messages call `stage`. `flags`: further true options.

    Raises: InvalidArgument, which names an option that is unknown, in the wrong place, of a wrong
    type, or in contradiction to another.
    """
    additional = additional_config or {}
    _check_place(additional, stage)
    given = additional.get(KEY, {})
    where = f"{stage}: additional_config.{KEY}"
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{where} must have keys, as in {{component: thinker}}: {given!r}")
    for flag in flags:
        given = _with_flag(given, flag, where)
    for name in given:
        _check_name(str(name), where)
    own = {name: given[name] for name in _OWN if given.get(name) is not None}
    _check_slices(own, where)
    options = Options(
        **{name: _converted(name, value, where) for name, value in own.items()},
        offload=_offload_of(given, where),
        offload_said=given.get("cpu_offload_enabled") is not None,
    )
    if options.offload_num_in_group > max(options.offload_group_size, 1):
        raise InvalidArgument(
            f"{where}.offload_num_in_group: {options.offload_num_in_group} of a group of "
            f"{options.offload_group_size} layers cannot stream: set offload_group_size to more"
        )
    return options


def _check_place(additional: Mapping[str, Any], stage: str) -> None:
    for name in additional:  # else vLLM and swapd would both ignore it
        near = get_close_matches(str(name).lower(), [KEY], cutoff=0.8)
        if name in NAMES or (near and name != KEY):
            raise InvalidArgument(
                f"{stage}: swapd does not read additional_config.{name}: its options are in "
                f"additional_config: {{{KEY}: {{...}}}}"
            )


def _with_flag(given: Mapping[str, Any], flag: str, where: str) -> Mapping[str, Any]:
    for name in (flag, "cpu_offload_enabled"):
        if given.get(name) is False:
            raise InvalidArgument(
                f"{where}.{name}: false contradicts {flag}: leave out one of them"
            )
    return {**given, flag: True}


def _offload_of(given: Mapping[str, Any], where: str) -> OffloadSettings:
    try:
        offload = settings.from_keywords(**{n: v for n, v in given.items() if n not in _OWN})
    except InvalidArgument as exc:
        raise InvalidArgument(f"{where}.{exc}") from exc
    if offload.cpu_offload_components is not None and offload.mode == "off":
        raise InvalidArgument(
            f"{where}.cpu_offload_components does nothing without cpu_offload_enabled: true"
        )
    return offload


def _check_slices(own: Mapping[str, Any], where: str) -> None:
    if "slice_s" not in own:
        return
    if "finish_within_s" in own:
        raise InvalidArgument(
            f"{where}.slice_s ends a turn inside requests, and finish_within_s lets them finish: "
            "set one of the two"
        )
    if own.get("kv") == "drop":
        raise InvalidArgument(
            f"{where}.slice_s ends a turn inside requests, and kv: drop would drop their cache: "
            "set kv: auto, or leave out slice_s"
        )


def _check_name(name: str, where: str) -> None:
    if name not in NAMES:
        raise InvalidArgument(f"{where}.{name} is no option of swapd; {meant(name, NAMES)}")


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return parse_size(msgspec.convert(value, str))


def _finite(value: Any) -> float:
    seconds = msgspec.convert(value, float)
    if not isfinite(seconds):
        raise ValueError("give a number of seconds")
    return seconds


#: Conversions that come before msgspec's.
_FIRST: Mapping[str, Callable[[Any], Any]] = {
    "load_workspace": _size,
    "resident": lambda value: value if value == "auto" else _size(value),
    "finish_within_s": _finite,
    "slice_s": _finite,
}
_TYPES = get_type_hints(Options, include_extras=True)


def _converted(name: str, value: Any, where: str) -> Any:
    try:
        value = _FIRST[name](value) if name in _FIRST else value
        return msgspec.convert(value, _TYPES[name])
    except ValueError as exc:  # msgspec's errors too
        choices = get_args(_TYPES[name]) if get_origin(_TYPES[name]) is Literal else ()
        problem = f"give one of {', '.join(choices)}" if choices else exc
        raise InvalidArgument(f"{where}.{name}: {problem}; it is {value!r}") from exc


# --- the flags of a diffusion stage --------------------------------------------------------


def options_of_stage(stage: Mapping[str, Any], where: str) -> Options:
    """As `options_of`, with the stage's own flags.

    Raises: InvalidArgument also for flags that contradict the options.
    """
    flags = _flags_of(stage, where)
    try:
        return options_of(stage.get("additional_config"), where, flags)
    except InvalidArgument as exc:
        for name in flags:
            if name in str(exc):
                raise InvalidArgument(f"{exc}. {name} is the stage's own flag") from exc
        raise


def take_over(config: Any, where: str) -> Options:
    """As `options_of_stage`; move the flags of `config` into its `additional_config`.

    vllm-omni's own offloader then finds none.
    """
    options = options_of_stage(vars(config), where)
    additional = config.additional_config or {}
    for name in ("order", "chunks_per_turn"):
        if additional.get(KEY, {}).get(name) is not None:
            log.warning("%s: %s has no effect on a diffusion stage: leave it out", where, name)
    if not (flags := _flags_of(vars(config), where)):
        return options
    swapd = {**additional.get(KEY, {}), **dict.fromkeys(flags, True)}
    config.additional_config = {**additional, KEY: swapd}
    for name in flags:
        setattr(config, name, False)
    setattr(config, _CONFIG, None)
    vars(config).pop("_resolved_diffusion_offload", None)  # vllm-omni's cache
    log.info(
        "%s: swapd takes over %s from vllm-omni, as its own option of that name",
        where,
        " and ".join(flags),
    )
    return options


def _flags_of(stage: Mapping[str, Any], where: str) -> list[str]:
    chosen = stage.get(_CONFIG)
    same = [name for name in _FLAGS if _means(chosen, *_FLAGS[name])]
    if chosen and not same:
        raise InvalidArgument(
            f"{where}: swapd has no offloading like this {_CONFIG}: set {' or '.join(_FLAGS)} "
            "instead of it"
        )
    return [name for name in _FLAGS if stage.get(name) or name in same]


def _means(chosen: object, mode: str, components: set[str]) -> bool:
    if not isinstance(chosen, Mapping) or chosen.get("layer_options"):
        return False
    named = chosen.get("components")
    every = isinstance(named, Collection) and {*map(str, named)} == components
    return every and chosen.get("mode") == mode
