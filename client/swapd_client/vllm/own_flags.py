"""The offloading flags that a diffusion stage sets beside `additional_config`.

swapd takes them over from vllm-omni as its own options of the same names.
"""

from collections.abc import Collection, Mapping
from typing import Any

from swapd_client.errors import InvalidArgument
from swapd_client.log import log
from swapd_client.vllm.options import KEY, Options, options_of

#: Flags, with the mode and components of a `diffusion_offload_config` that means the same.
_FLAGS: Mapping[str, tuple[str, set[str]]] = {
    "enable_layerwise_offload": ("layer", {"dit"}),
    "enable_cpu_offload": ("module", {"dit", "text_encoder"}),
}
_CONFIG = "diffusion_offload_config"


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
    if not (flags := _flags_of(vars(config), where)):
        return options
    additional = config.additional_config or {}
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
