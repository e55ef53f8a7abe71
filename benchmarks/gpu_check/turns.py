"""Two workers take turns on memory that holds one of them: same bits, same addresses."""

from typing import Any

from benchmarks.gpu_check.rig import Worker, chunks_of, registered, room_for, serving, workers
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings

ROUNDS = 5
LAYERS = 4


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    span = chunks_of(nbytes, settings)
    # a chunk more than two of them, so that the third does not fit and chunks change hands
    with (
        serving(settings, 2 * span + settings.chunk_bytes) as daemon,
        workers(settings, daemon.folder, "one", "two") as (one, two),
    ):
        models = (one, "a"), (two, "b"), (two, "c")
        expected = registered(*models, nbytes=nbytes, layers=LAYERS)
        with check.part("workers take turns", guarantee=True):
            _take_turns(check, one, two, expected)
        with check.part("a captured graph", guarantee=True):
            _graph(check, one, two, expected["a"])
        with check.part("a mutable component", guarantee=True):
            _mutable(check, one, two, nbytes)
        with check.part("after close", guarantee=True):
            _close(check, one, expected["a"])


def _take_turns(check: Check, one: Worker, two: Worker, expected: dict[str, str]) -> None:
    """Each turn evicts the least recently used of the others."""
    seen: list[tuple[str, dict[str, Any]]] = []
    for _ in range(ROUNDS):
        for worker, name in ((one, "a"), (two, "b"), (two, "c")):
            seen.append((name, worker.ask("turn", name)))
    right = all(turn["digest"] == expected[name] for name, turn in seen)
    check.holds("results are those of the model before it was swapped, bit for bit", right)
    loads = sum(turn["loaded"] for _, turn in seen)
    check.holds("each turn had to be swapped in", loads == len(seen), f"{loads} of {len(seen)}")
    places = {name: {tuple(t["addresses"]) for n, t in seen if n == name} for name in expected}
    check.holds("every data_ptr stays", all(len(found) == 1 for found in places.values()))


def _graph(check: Check, one: Worker, two: Worker, expected: str) -> None:
    """Captured, evicted, loaded into other chunks, replayed."""
    captured = one.ask("capture", "a")
    before = one.ask("replay", "a")
    check.holds("a graph computes what the model computes", captured == expected)
    # first load a into the old chunks of b and c, then again when they have moved
    moved = False
    right = True
    for first, second in (("b", "c"), ("c", "b"), ("b", "c")):
        two.ask("turn", first)
        two.ask("turn", second)
        after = one.ask("replay", "a")
        moved = moved or after["runs"] != before["runs"]
        right = right and after["digest"] == expected
    check.holds("a graph captured before an eviction replays afterwards, bit for bit", right)
    check.holds("on other chunks", moved, f"from {before['runs']} to {after['runs']}")


def _mutable(check: Check, one: Worker, two: Worker, nbytes: int) -> None:
    """Written under leases, evicted in between: the written bytes come back."""
    one.ask("build", "m", nbytes, LAYERS, 7)
    one.ask("register", "m", mutable=True)
    one.ask("keep", "m")
    same = True
    for number in range(ROUNDS):
        one.ask("add", "m", 0.5 + number)
        two.ask("turn", "b")
        two.ask("turn", "c")
        same = same and one.ask("is_as_kept", "m")
    check.holds("a mutable component comes back as it was written, bit for bit", same)


def _close(check: Check, one: Worker, expected: str) -> None:
    addresses = one.ask("addresses", "a")
    outputs = one.ask("close")
    check.holds("after close() the weights are private memory, unchanged", outputs[0] == expected)
    check.holds("at the same addresses", one.ask("addresses", "a") == addresses)
