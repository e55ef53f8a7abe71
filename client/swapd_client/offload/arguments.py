"""The arguments of `Client.attach`, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from swapd.shared.protocol import Policy
from swapd_client.errors import InvalidSettings, InvalidSource
from swapd_client.offload.installing import Methods
from swapd_client.offload.private import Trainable
from swapd_client.offload.settings import OffloadSettings, from_keywords
from swapd_client.offload.strategy import Kind, Sharing

_Names = TypeVar("_Names")


@dataclass(frozen=True)
class Arguments:
    """The arguments of `Client.attach`."""

    components: Sequence[str] | None
    settings: OffloadSettings | None
    prefix: str
    #: For all components, if there are no settings.
    how: Sharing
    resident: int | str | Mapping[str, int | str] | None
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None
    wrap_methods: Methods
    extra_tensors: Sequence[str]
    #: For components whose name does not show their kind.
    kinds: Mapping[str, Kind]
    #: Components that are never evicted; overrides the settings.
    stay: Sequence[str]
    trainable: Trainable


def arguments_of(
    components: str | Sequence[str] | None,
    *,
    settings: OffloadSettings | None,
    prefix: str,
    policy: Policy,
    resident: int | str | Mapping[str, int | str] | None,
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None,
    wrap_methods: Methods,
    extra_tensors: Sequence[str],
    kinds: Mapping[str, Kind],
    stay: Sequence[str],
    trainable: Trainable | str,
    flags: Mapping[str, Any],
) -> Arguments:
    """The arguments of `Client.attach`, checked. Raises: InvalidSource, InvalidSettings."""
    settings = _chosen(settings, flags)
    if settings is not None and policy != "lru":
        raise InvalidSource(
            f"policy={policy!r} and settings both set how components share the device; give "
            "one of them"
        )
    if components is None and settings is not None:
        components = settings.cpu_offload_components
    return Arguments(
        components=_listed(components),
        settings=settings,
        prefix=prefix,
        how=Sharing(policy, exclusive=policy == "alternating"),
        resident=resident,
        blocks=_listed(blocks),
        wrap_methods=_listed(wrap_methods),
        extra_tensors=_listed(extra_tensors),
        kinds=kinds,
        stay=_listed(stay),
        trainable=trainable if isinstance(trainable, bool) else _listed(trainable),
    )


def _chosen(given: OffloadSettings | None, flags: Mapping[str, Any]) -> OffloadSettings | None:
    """The settings, from `settings=` or from keyword arguments. Raises: InvalidSettings."""
    if not flags:
        return given
    if given is not None:
        names = ", ".join(flags)
        raise InvalidSettings(f"settings= and {names}: give all in one or the other")
    return from_keywords(**flags)


def _listed(names: _Names) -> _Names:
    """A single name is a list of one name, not of its letters."""
    return cast("_Names", [names]) if isinstance(names, str) else names
