"""The arguments of `Client.attach`, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from swapd.shared.protocol import Policy
from swapd_client.errors import InvalidArgument, InvalidSource
from swapd_client.offload.installing import Methods
from swapd_client.offload.private import Trainable
from swapd_client.offload.settings import NAMES, OffloadSettings, from_keywords
from swapd_client.offload.strategy import Kind

_Names = TypeVar("_Names")


@dataclass(frozen=True)
class Arguments:
    components: Sequence[str] | None
    settings: OffloadSettings | None
    prefix: str
    policy: Policy
    resident: int | str | Mapping[str, int | str] | None
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None
    wrap_methods: Methods
    extra_tensors: Sequence[str]
    #: For components whose name does not show their kind.
    kinds: Mapping[str, Kind]
    #: Components that are never evicted; overrides the settings.
    stay: Sequence[str]
    trainable: Trainable


def checked(given: Arguments, flags: Mapping[str, Any]) -> Arguments:
    """`given`, with single settings from `flags`. Raises: InvalidSource, InvalidArgument."""
    _check_names(flags)
    settings, components = given.settings, given.components
    if flags and settings is not None:
        names = ", ".join(flags)
        raise InvalidArgument(f"settings= and {names}: give all in one or the other")
    settings = from_keywords(**flags) if flags else settings
    if settings is not None and given.policy != "lru":
        raise InvalidSource(
            f"policy={given.policy!r} and settings both set how components share the device; give "
            "one of them"
        )
    if components is None and settings is not None:
        components = settings.cpu_offload_components
    return replace(
        given,
        components=_listed(components),
        settings=settings,
        blocks=_listed(given.blocks),
        wrap_methods=_listed(given.wrap_methods),
        extra_tensors=_listed(given.extra_tensors),
        stay=_listed(given.stay),
        trainable=_listed(given.trainable),
    )


def _check_names(flags: Mapping[str, Any]) -> None:
    own = [field.name for field in fields(Arguments)]
    for name in flags.keys() - set(NAMES):
        if near := get_close_matches(name, own, n=1):
            raise InvalidArgument(f"attach({name}=...): did you mean {near[0]}=?")


def _listed(names: _Names) -> _Names:
    """A single name is a list of one name, not of its letters."""
    return cast("_Names", [names]) if isinstance(names, str) else names
