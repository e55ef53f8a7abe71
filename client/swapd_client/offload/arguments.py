"""The arguments of `Client.attach`, as checked before anything is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from swapd.shared.protocol import Policy
from swapd_client.checks import check, names_in
from swapd_client.errors import InvalidArgument, InvalidSource
from swapd_client.offload.installation import Methods
from swapd_client.offload.private import Trainable
from swapd_client.offload.settings import NAMES, OffloadSettings, from_keywords
from swapd_client.offload.strategy import Kind


@dataclass(frozen=True)
class Arguments:
    components: Sequence[str] | None = None
    settings: OffloadSettings | None = None
    prefix: str = ""
    policy: Policy = "lru"
    resident: int | str | Mapping[str, int | str] | None = None
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None = None
    wrap_methods: Methods = ()
    extra_tensors: Sequence[str] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    stay: Sequence[str] = ()
    trainable: Trainable = None


def checked(given: Arguments, flags: Mapping[str, Any]) -> Arguments:
    """Merge `flags` into `given.settings`. Raises: InvalidSource, InvalidArgument."""
    _check_names(flags)
    check("settings", given.settings, OffloadSettings | None, "an OffloadSettings")
    check("prefix", given.prefix, str, "a text")
    check("kinds", given.kinds, Mapping, "a dict of components and their kinds")
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
    return _listed(replace(given, components=components, settings=settings))


def _listed(given: Arguments) -> Arguments:
    listed = replace(given, **{name: _list_of(name, getattr(given, name)) for name in _LISTS})
    if listed.components is not None and not listed.components:
        raise InvalidArgument("components is empty; leave it out to attach all components found")
    return listed


def _list_of(argument: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: names_in(argument, its, value) for name, its in value.items()}
    unlisted = _UNLISTED.get(argument, ())
    return value if any(value is one for one in unlisted) else names_in(argument, value)


_UNLISTED = {"components": (None,), "blocks": (None,), "trainable": (None, True, False)}
_LISTS = ("components", "blocks", "wrap_methods", "extra_tensors", "stay", "trainable")


def _check_names(flags: Mapping[str, Any]) -> None:
    own = [field.name for field in fields(Arguments)]
    for name in flags.keys() - set(NAMES):
        if near := get_close_matches(name, own, n=1):
            raise InvalidArgument(f"attach({name}=...): did you mean {near[0]}=?")
