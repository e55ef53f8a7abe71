"""Translates the settings into a policy for each component. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from swapd.shared.protocol import Policy
from swapd.shared.units import parse_size
from swapd_client.errors import InvalidArgument, InvalidSource
from swapd_client.memory.part import Part
from swapd_client.offload.automatic import BESIDE_DITS, DITS, ENCODERS, VAES
from swapd_client.offload.settings import OffloadSettings

Kind = Literal["dit", "encoder", "vae", ""]

#: The family of all encoders: they exclude the DiTs, but not each other.
ENCODERS_FAMILY = "encoders"


@dataclass(frozen=True)
class Sharing:
    policy: Policy = "lru"
    part_of: str = ""
    streamed: bool = False
    #: If streamed: how many bytes to keep on the device. None: as many as fit.
    resident: int | None = None
    #: The paths of its blocks, or of lists of them. None: those that are found.
    blocks: Sequence[str] | None = None

    @property
    def is_exclusive(self) -> bool:
        return self.policy == "alternating"

    def is_of(self, part: Part) -> bool:
        """Whether a registered component shares the device like this."""
        by_block = bool(part.part_of) and self.resident is None and self.blocks is None
        return part.policy == self.policy and (by_block or not self.streamed)


def kind_of(name: str) -> Kind:
    """Return the kind that a component's name shows; "" if it shows no kind."""
    last = name.rpartition(".")[2]
    bare = last.rstrip("0123456789").rstrip("_")
    kinds: dict[Kind, tuple[str, ...]] = {"dit": DITS, "encoder": ENCODERS, "vae": VAES}
    return next((kind for kind, names in kinds.items() if last in names or bare in names), "")


def refuse_unknown(what: str, names: Iterable[str], there: Iterable[str]) -> None:
    for name in names:
        if name not in there:
            raise InvalidSource(
                f"{what}: no component is called {name!r}; there are: {', '.join(there)}"
            )


def refuse_kinds(kinds: Mapping[str, Kind], there: Iterable[str]) -> None:
    refuse_unknown("kinds", kinds, there)
    for name, kind in kinds.items():
        if kind not in get_args(Kind):
            raise InvalidArgument(
                f"kinds: {kind!r}, of {name!r}, is none; there are: dit, encoder, vae"
            )


def beside_dits(names: Collection[str], kind_of: Callable[[str], Kind]) -> list[str]:
    """Return the components that run at each step of a DiT, and so must not exclude it."""
    if not any(kind_of(name) == "dit" for name in names):
        return []
    return [name for name in names if name.rpartition(".")[2] in BESIDE_DITS]


def of_settings(
    sizes: Mapping[str, int], settings: OffloadSettings, kind_of: Callable[[str], Kind] = kind_of
) -> dict[str, Sharing]:
    """Return how each component shares the device, if a switch is on. `sizes`: bytes."""
    mode = settings.mode
    by_kind, others = _MODES[mode]
    hows = {name: by_kind.get(kind_of(name), others) for name in sizes}
    if mode == "layerwise":
        hows |= dict.fromkeys(_worth_streaming(sizes, kind_of), Sharing(streamed=True))
    if settings.offloaded_bytes:
        for name in _worth_streaming(sizes, kind_of):
            rest = max(sizes[name] - settings.offloaded_bytes, 0)
            hows[name] = replace(hows[name], streamed=True, resident=rest)
    return hows


_STAYING: Mapping[Kind, Sharing] = {"vae": Sharing("permanent")}
_EXCLUSIVE = Sharing("alternating")
_TURNS: Mapping[Kind, Sharing] = {
    "dit": _EXCLUSIVE,
    "encoder": replace(_EXCLUSIVE, part_of=ENCODERS_FAMILY),
    **_STAYING,
}
#: By mode: how components of these kinds share the device, and how all others do.
_MODES: Mapping[str, tuple[Mapping[Kind, Sharing], Sharing]] = {
    "alternating": ({}, _EXCLUSIVE),
    "sequential": ({}, Sharing("sequential")),
    "model": (_TURNS, Sharing()),
    "layerwise": (_STAYING, Sharing()),
    "partial": ({}, Sharing()),
}


def _worth_streaming(names: Mapping[str, int], kind_of: Callable[[str], Kind]) -> list[str]:
    """Return the DiTs; or if there are none, all but encoders and VAEs; or else all."""
    dits = [name for name in names if kind_of(name) == "dit"]
    return dits or [name for name in names if not kind_of(name)] or list(names)


def of_arguments(
    sizes: Mapping[str, int],
    hows: Mapping[str, Sharing],
    stay: Sequence[str],
    arguments: Mapping[str, Any],
    kind_of: Callable[[str], Kind],
) -> dict[str, Sharing]:
    """Return `hows` with the components in the arguments `resident` and `blocks` streamed.

    Values without names apply to all components worth streaming. `stay`: components that are not in
    `sizes` and `hows`. Raises: InvalidSource.
    """
    changed = dict(hows)
    for what, given in arguments.items():
        if given is None:
            continue
        worth = _worth_streaming(sizes, kind_of) or stay
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(worth, given)
        refuse_unknown(what, by_name, [*changed, *stay])
        for name, value in by_name.items():
            if name in stay:
                raise InvalidSource(f"{what}: {name!r} is in stay=, so nothing of it is streamed")
            own: dict[str, Any] = {what: _amount(value) if what == "resident" else value}
            changed[name] = replace(changed[name], streamed=True, **own)
    return changed


def _amount(given: object) -> int | None:
    try:
        nbytes = parse_size(given) if isinstance(given, str) else given
    except ValueError as exc:
        raise InvalidSource(f"resident: {exc}") from exc
    if nbytes is not None and (type(nbytes) is not int or nbytes < 0):  # True is no size
        raise InvalidSource(f'resident: {given!r} is no size; give bytes, or one like "5.6GiB"')
    return nbytes
