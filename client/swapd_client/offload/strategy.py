"""Translates the settings into a policy for each component of a model. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swapd.shared.protocol import Policy
from swapd.shared.units import parse_size
from swapd_client.errors import InvalidSource
from swapd_client.offload.automatic import BESIDE_DITS, DITS, ENCODERS, VAES
from swapd_client.offload.settings import OffloadSettings

Kind = Literal["dit", "encoder", "vae", ""]

#: The family of all encoders: they exclude the DiTs, but not each other.
ENCODERS_FAMILY = "encoders"


@dataclass(frozen=True)
class Sharing:
    policy: Policy = "lru"
    #: Its family.
    part_of: str = ""
    streamed: bool = False
    #: If streamed: bytes, or a size, to keep on the device. None: as much as fits.
    resident: int | str | None = None

    @property
    def is_exclusive(self) -> bool:
        """Whether it excludes the other exclusive components."""
        return self.policy == "alternating"


def kind_of(name: str) -> Kind:
    """The kind of a component, by its name; "" if the name does not show it."""
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


def beside_dits(names: Collection[str], kind_of: Callable[[str], Kind] = kind_of) -> list[str]:
    """Components that run at each step of a DiT: if they excluded it, each step would load both."""
    if not any(kind_of(name) == "dit" for name in names):
        return []
    return [name for name in names if name.rpartition(".")[2] in BESIDE_DITS]


def of_settings(
    sizes: Mapping[str, int], settings: OffloadSettings, kind_of: Callable[[str], Kind] = kind_of
) -> dict[str, Sharing]:
    """How each component shares the device. `sizes`: bytes of the components.

    Empty if no switch is on.
    """
    mode = settings.mode
    if mode == "off":
        return {}
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
#: By mode: components of these kinds, and all others.
_MODES: Mapping[str, tuple[Mapping[Kind, Sharing], Sharing]] = {
    "alternating": ({}, _EXCLUSIVE),
    "sequential": ({}, Sharing("sequential")),
    "model": (_TURNS, Sharing()),
    "layerwise": (_STAYING, Sharing()),
    "partial": ({}, Sharing()),
}


def _worth_streaming(names: Mapping[str, int], kind_of: Callable[[str], Kind]) -> list[str]:
    """The DiTs; if there are none, components that are no encoder and no VAE; else all."""
    dits = [name for name in names if kind_of(name) == "dit"]
    return dits or [name for name in names if not kind_of(name)] or list(names)


def of_arguments(
    sizes: Mapping[str, int],
    hows: Mapping[str, Sharing],
    resident: int | str | Mapping[str, int | str] | None,
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None,
    kind_of: Callable[[str], Kind] = kind_of,
) -> dict[str, Sharing]:
    """`hows`, with the components in `resident` and `blocks` streamed.

    Values without names apply to all components worth streaming. Raises: InvalidSource.
    """
    changed = dict(hows)
    for what, given in (("resident", resident), ("blocks", blocks)):
        if given is None:
            continue
        names = list(given) if isinstance(given, Mapping) else _worth_streaming(sizes, kind_of)
        refuse_unknown(what, names, changed)
        for name in names:
            how = changed[name]
            amount = how.resident
            if what == "resident":
                amount = _amount(given[name] if isinstance(given, Mapping) else given)
            changed[name] = replace(how, streamed=True, resident=amount)
    return changed


def _amount(given: object) -> int | None:
    try:
        nbytes = parse_size(given) if isinstance(given, str) else given
    except ValueError as exc:
        raise InvalidSource(f"resident: {exc}") from exc
    if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
        raise InvalidSource(f'resident: {given!r} is no size; give bytes, or one like "5.6GiB"')
    return nbytes
