"""The memory of a daemon that stages share: what it must hold, and the bytes of a round. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from swapd.plan import rounds
from swapd.plan.advise import CHUNK_BYTES
from swapd.plan.demands import Demand, WeightGroup
from swapd.plan.rounds import Turn


class Arena(NamedTuple):
    """An arena of at most `nbytes`, and the stages that share it. Bytes."""

    ours: Sequence[Demand]
    nbytes: int

    @property
    def stays(self) -> int:
        return sum(c.staying for c in self.ours)

    def needed(self, caches: Mapping[str, int]) -> int:
        """The permanent components, and the largest turn."""
        return self.stays + max((c.turning(caches[c.name]) for c in self.ours), default=0)

    def room_of(self, claim: Demand) -> int:
        """The most that the weights of its turn may take."""
        return self.nbytes - self.stays - claim.cache_bytes()

    def lacks(self, claim: Demand) -> bool:
        """Whether a stage whose layers can stream has no room for its turn."""
        part = claim.streams if claim.ours else None
        could = part is not None and not part.streamed
        return could and claim.turning(0) > self.room_of(claim)

    def whole(self, caches: Mapping[str, int]) -> int:
        """All of them at once."""
        return sum(p.taken for c in self.ours for p in c.parts) + sum(caches.values())

    def fits(self, caches: Mapping[str, int]) -> bool:
        return self.whole(caches) <= self.nbytes

    def cost(self, caches: Mapping[str, int]) -> tuple[bool, int]:
        """Whether stages take turns, and the bytes of a round."""
        return not self.fits(caches), self.moved(caches)[0]

    def moved(self, caches: Mapping[str, int]) -> tuple[int, int]:
        """Bytes of a round by layers, and as a whole."""
        if self.fits(caches):
            return 0, 0
        return _moved(_turns(self.ours, caches), self.nbytes - self.stays, chunk_of(self.ours))


def chunk_of(ours: Sequence[Demand]) -> int:
    return ours[0].chunk if ours else CHUNK_BYTES


# --- turns ---------------------------------------------------------------------------------


def _turns(ours: Sequence[Demand], caches: Mapping[str, int]) -> list[Turn]:
    """The turns: one for each stage; for a stage whose parts take turns, one for each part; for a
    permanent stage, its KV cache."""
    found: list[Turn] = []
    for claim in ours:
        parts, cache = [p for p in claim.parts if not p.stays], caches[claim.name]
        together = [parts] if claim.at_once else [[p] for p in parts]
        found += [_turn(some, cache) for some in together if some or cache]
    return found


def _turn(parts: Sequence[WeightGroup], cache: int) -> Turn:
    by_layer = next((p for p in parts if p.layers), None)
    return Turn(
        taken=sum(p.taken for p in parts),
        copied=sum(p.copied for p in parts),
        cache=cache,
        layers=by_layer.layers if by_layer else 1,
        layer_taken=by_layer.layer_taken if by_layer else 0,
        layer_bytes=by_layer.layer_bytes if by_layer else 0,
    )


def _moved(turns: Sequence[Turn], room: int, chunk: int) -> tuple[int, int]:
    """Bytes of a round by layers, and as a whole; a part larger than `room` is streamed."""
    streamed = sum(turn.copied for turn in turns if turn.taken > room)
    others = [turn for turn in turns if turn.taken <= room]
    by_layer = rounds.by_layer_bytes(others, room, chunk)
    whole = rounds.whole_bytes(others, room)
    return streamed + by_layer, streamed + whole
