"""Engines that start at once on one device measure it, load and warm up one after the other."""

from collections.abc import Mapping
from itertools import pairwise

from swapd.core import actions, events
from swapd.log import reader
from swapd.log.records import Record
from swapd.shared import protocol
from tests.vllm.engines import REQUESTS, TOKENS, Scene, by_component
from tests.vllm.models import MODELS

Expected = Mapping[str, list[list[list[int]]]]


def spans(records: list[Record]) -> list[tuple[float, float]]:
    """Start and end of each engine's turn to start."""
    asked: set[tuple[int, int]] = set()
    begun: dict[tuple[int, int], float] = {}
    ended = []
    for record in records:
        match record.event or record.action:
            case events.SessionRequest(session=session, request=protocol.AcquireStart(id=request)):
                asked.add((session, request))
            case actions.Grant(session=session, request=request) if (session, request) in asked:
                begun[session, request] = record.time
            case events.SessionRequest(session=session, request=protocol.Release()):
                ended += [(began, record.time) for began in ending(begun, session)]
            case events.SessionGone(session=session):  # at times, this record comes first
                ended += [(began, record.time) for began in ending(begun, session)]
    assert not begun, "a stage has started and still has the turn"
    return ended


def ending(begun: dict[tuple[int, int], float], session: int) -> list[float]:
    return [begun.pop(key) for key in list(begun) if key[0] == session]


def test_three_engines_that_start_at_once_on_an_arena_for_one_start_one_after_the_other(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    engines = scene.on_swapd(daemon, *MODELS)
    status = daemon.status()
    assert status.starting == ()
    records = [line.record for line in reader.read(daemon.swap_log)]
    turns = spans(records)
    assert len(turns) == len(MODELS)
    for (_, ended), (began, _) in pairwise(turns):
        assert ended <= began, "two started at once"
    lent = [r.time for r in records if isinstance(r.action, actions.Lend)]
    assert len(lent) == len(MODELS)
    for at, (began, ended) in zip(lent, turns, strict=True):
        assert began < at < ended, "memory was lent to load in while another stage measured"
    sizes = sorted(sum(c.nbytes for c in parts) for parts in by_component(daemon).values())
    workspaces = sorted(
        sum(count for _, count in one.runs) * status.chunk_bytes
        for one in daemon.watch.seen("Lend")
    )
    assert all(a >= b for a, b in zip(workspaces, sizes, strict=True))
    assert status.peak_bytes <= status.budget_bytes < sum(sizes)
    for engine in engines:
        assert engine.generate(REQUESTS[0], TOKENS) == expected[engine.label][0]
