"""Folds the parts of a streamed component into one, for people.

It folds only families whose parts have its name as a prefix: the parts of other families have
names that users know.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from swapd.shared.protocol import ComponentStatus, part_name
from swapd.shared.units import size


class Family(NamedTuple):
    """The parts of one component, in the order of their registration."""

    name: str
    parts: tuple[ComponentStatus, ...]

    @property
    def inside(self) -> list[ComponentStatus]:
        return [c for c in self.parts if c.inside]

    @property
    def kept(self) -> list[ComponentStatus]:
        """The parts that do not leave when they are released."""
        return [c for c in self.parts if c.policy != "sequential"]

    @property
    def amount(self) -> str:
        """Its size on the device."""
        return f"{size(_nbytes(self.inside))} of {size(_nbytes(self.parts))}"

    @property
    def state(self) -> str:
        count = f"{len(self.parts)} parts" if len(self.parts) > 1 else "1 part"
        return f"{count}, {len(self.inside)} in"

    @property
    def keeps(self) -> str:
        """Its permanent size on the device."""
        kept, size_kept = len(self.kept), size(_nbytes(self.kept))
        return f"{kept} of {len(self.parts)} parts kept, {size_kept} of {size(_nbytes(self.parts))}"


def fold(components: Iterable[ComponentStatus]) -> Iterator[ComponentStatus | Family]:
    """`components` with each family in place of its first part."""
    listed = list(components)
    seen: set[str] = set()
    for c in listed:
        if not _is_part(c):
            yield c
        elif c.part_of not in seen:
            seen.add(c.part_of)
            parts = tuple(p for p in listed if _is_part(p) and p.part_of == c.part_of)
            yield Family(c.part_of, parts)


def _is_part(c: ComponentStatus) -> bool:
    return bool(c.part_of) and c.name.startswith(part_name(c.part_of, ""))


def _nbytes(parts: Iterable[ComponentStatus]) -> int:
    return sum(c.nbytes for c in parts)
