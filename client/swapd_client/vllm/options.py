"""Options of a stage in `additional_config.swapd`.

Lives here: names, defaults, meanings, and checks. Neither torch nor vLLM.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from swapd.shared.units import parse_size
from swapd_client.errors import InvalidSettings
from swapd_client.offload import settings
from swapd_client.offload.settings import OffloadSettings

#: Least chunks of each part of a stage that is evicted by layers. Parts take whole chunks, and half
#: a chunk is empty on average: so at most 1/32 of their device memory.
PART_CHUNKS = 16

#: The key of `additional_config` that contains the options.
KEY = "swapd"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's options; the defaults hold for a stage without options."""

    #: The stage's name in the daemon; "": as in vllm-omni, or as its model.
    component: str = ""
    #: The daemon's runtime folder; "": `$SWAPD_ENDPOINT`, or that of the rank's GPU.
    endpoint: str = ""
    #: Seconds that requests in flight may take to finish when another stage waits.
    finish_within_s: float = 10.0
    #: Seconds of a turn when another stage waits, even with requests in flight; None: as above.
    slice_s: float | None = None
    #: Bytes of device memory to lend for loading; None: as much as the stage's files have.
    load_workspace: int | None = None
    #: Names in the daemon of the pipeline's stages, in the order in which a request passes them;
    #: None: the order of vllm-omni. (): no other stage is loaded ahead.
    order: tuple[str, ...] | None = None
    #: The KV cache between two turns. "private": it is not in swapd. "drop": its contents are
    #: dropped, and a turn lasts until no request is in flight. "auto": swapd saves the blocks of
    #: requests in flight, and with prefix caching those of finished requests. "save": swapd always
    #: saves both.
    kv: Literal["private", "drop", "auto", "save"] = "private"
    #: With `async_chunk`: chunks of a request that a stage makes in a turn before it gives way to
    #: the stage that consumes them; for the same request twice as many each time. 0: it first
    #: finishes the requests in flight.
    chunks_per_turn: int = 32
    #: Whether the stage names the weights it accessed outside of its turn before it dies of that.
    faults: Literal["explain", "silent"] = "explain"
    #: The `cpu_offload_*` keys, and vllm-omni's others.
    offload: OffloadSettings = OffloadSettings()
    #: Whether `cpu_offload_enabled` is set at all: false differs from unset.
    offload_said: bool = False


_OWN = (
    *("component", "endpoint", "finish_within_s", "slice_s"),
    *("load_workspace", "faults", "kv", "order", "chunks_per_turn"),
)
NAMES = (*_OWN, *settings.NAMES)


def options_of(additional_config: Mapping[str, Any] | None, stage: str) -> Options:
    """The options of a stage; messages name it `stage`.

    Raises: InvalidSettings, which names the option that is unknown, of the wrong type, or in
    contradiction to another.
    """
    given = (additional_config or {}).get(KEY, {})
    where = f"{stage}: additional_config.{KEY}"
    if not isinstance(given, Mapping):
        raise InvalidSettings(f"{where} must have keys, as in {{component: thinker}}: {given!r}")
    for name in given:
        _known(str(name), where)
    try:
        offload = settings.from_keywords(**{n: v for n, v in given.items() if n not in _OWN})
    except InvalidSettings as exc:
        raise InvalidSettings(f"{where}.{exc}") from exc
    if offload.cpu_offload_components is not None and offload.mode == "off":
        raise InvalidSettings(
            f"{where}.cpu_offload_components does nothing without cpu_offload_enabled: true"
        )
    own = {n: v for n, v in given.items() if n in _OWN and v is not None}
    _check_slices(own, where)
    return Options(
        **{name: _parsed(name, value, f"{where}.{name}") for name, value in own.items()},
        offload=offload,
        offload_said=given.get("cpu_offload_enabled") is not None,
    )


def _check_slices(own: Mapping[str, Any], where: str) -> None:
    """Check that a turn ends in one way. Raises: InvalidSettings."""
    if "slice_s" not in own:
        return
    if "finish_within_s" in own:
        raise InvalidSettings(
            f"{where}.slice_s ends a turn inside requests, and finish_within_s lets them finish: "
            "set one of the two"
        )
    if own.get("kv") == "drop":
        raise InvalidSettings(
            f"{where}.slice_s ends a turn inside requests, and kv: drop would drop their cache: "
            "set kv: auto, or leave out slice_s"
        )


def _known(name: str, where: str) -> None:
    if name in NAMES:
        return
    near = get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(NAMES)}"
    raise InvalidSettings(f"{where}.{name} is no option of swapd; {hint}")


def _parsed(name: str, value: Any, where: str) -> Any:
    try:
        if name == "load_workspace":
            return _size(value)
        if name == "finish_within_s":
            seconds = msgspec.convert(value, float)
            if not 0 <= seconds < float("inf"):
                raise ValueError("give seconds, 0 or more")
            return seconds
        if name == "slice_s":
            seconds = msgspec.convert(value, float)
            if not 0 < seconds < float("inf"):
                raise ValueError("give seconds, more than 0")
            return seconds
        if name == "chunks_per_turn":
            chunks = msgspec.convert(value, int)
            if chunks < 0:
                raise ValueError("give a number of chunks, 0 or more")
            return chunks
        if name == "kv":
            return msgspec.convert(value, Literal["private", "drop", "auto", "save"])
        if name == "order":
            return msgspec.convert(value, tuple[str, ...])
        if name == "faults":
            return msgspec.convert(value, Literal["explain", "silent"])
        return msgspec.convert(value, str)
    except ValueError as exc:  # msgspec's errors too
        raise InvalidSettings(f"{where}: {exc}; it is {value!r}") from exc


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return parse_size(msgspec.convert(value, str))
