"""Folds the parts of a streamed component into one row, for people.

It folds only families whose parts have its name as a prefix: the parts of other families have
names that users know.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from swapd.shared.protocol import ComponentStatus, part_name
from swapd.shared.units import size


class Family(NamedTuple):
    """A component, or the parts of a streamed one in the order of their registration."""

    name: str
    parts: tuple[ComponentStatus, ...]
    streamed: bool

    @property
    def inside(self) -> list[ComponentStatus]:
        return [c for c in self.parts if c.inside]

    @property
    def kept(self) -> list[ComponentStatus]:
        """The parts that do not leave when they are released."""
        return [c for c in self.parts if c.policy != "sequential"]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.parts)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(who for c in self.parts for who in c.holders))

    @property
    def leases(self) -> int:
        return sum(c.leases for c in self.parts)

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last release of a part; None: never used."""
        return min((c.idle_s for c in self.parts if c.idle_s is not None), default=None)

    @property
    def moves(self) -> str:
        """Loads and evictions."""
        return f"{sum(c.loads for c in self.parts)}/{sum(c.evictions for c in self.parts)}"

    @property
    def amount(self) -> str:
        """The size; of a streamed component, also that on the device."""
        if not self.streamed:
            return size(self.nbytes)
        return f"{size(sum(c.nbytes for c in self.inside))} of {size(self.nbytes)}"

    @property
    def keeps(self) -> str:
        """Its permanent size on the device."""
        nbytes = size(sum(c.nbytes for c in self.kept))
        return f"{len(self.kept)} of {len(self.parts)} parts kept, {nbytes} of {size(self.nbytes)}"


def single(c: ComponentStatus) -> Family:
    return Family(c.name, (c,), streamed=False)


def fold(components: Iterable[ComponentStatus]) -> Iterator[Family]:
    """A row for each component, and one for each family in place of its first part."""
    parts: dict[str, list[ComponentStatus]] = {}
    rows: list[ComponentStatus | str] = []
    for c in components:
        if not (c.part_of and c.name.startswith(part_name(c.part_of, ""))):
            rows.append(c)
            continue
        if c.part_of not in parts:
            rows.append(c.part_of)
        parts.setdefault(c.part_of, []).append(c)
    for row in rows:
        if isinstance(row, str):
            yield Family(row, tuple(parts[row]), streamed=True)
        else:
            yield single(row)
