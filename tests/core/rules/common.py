"""Set-ups that several of these tests share."""

from swapd.core.records import Key
from tests.core.world import Make, World


def blocked(make: Make, n: int = 3, **rules: float) -> tuple[World, Key, list[int]]:
    """A world whose memory one lease holds, and sessions that own c0, c1, ... of that size."""
    w = make(10, **rules)
    s = w.open()
    w.register(s, "held", 10)
    others = [w.open() for _ in range(n)]
    for i, other in enumerate(others):
        w.register(other, f"c{i}", 10)
    return w, w.use(s, "held"), others


def strict_pair(make: Make, **rules: float) -> tuple[World, int, int]:
    w = make(10, strict=True, **rules)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.touch(s, "a")
    return w, s, t


def mutable_pair(make: Make) -> tuple[World, int, int]:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.touch(s, "a")
    return w, s, t
