"""Real engines whose turns begin with their first layers, while the others are copied in."""

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees import harness
from tests.guarantees.harness import Daemon
from tests.guarantees.held_load import door, order
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    await_components,
    await_leases_back,
    by_component,
    on_swapd,
    plain,
    scene,
)

Expected = Mapping[str, list[list[list[int]]]]

#: Room for the deeper one, and not for much more.
BUDGET = "160MiB"
HELD = "tests.guarantees.held_load"
LATE, OTHER = "deep", "less-deep"


@pytest.fixture
def place(deep: Path, nursery: Nursery) -> Iterator[Scene]:
    with scene(deep, nursery) as made:
        try:
            yield made
        finally:  # after a failed test, the daemon would not end
            with suppress(OSError):
                os.close(os.open(door(made.folder / "d0"), os.O_WRONLY | os.O_NONBLOCK))


def pipe_of(place: Scene, name: str) -> Path:
    return place.folder / f"{name}.pipe"


def start(place: Scene, daemon: Daemon, *names: str) -> list[Engine]:
    arguments = []
    for name in names:
        pipe = pipe_of(place, name)
        if not pipe.exists():
            os.mkfifo(pipe)
        one = on_swapd(
            place.models / name, daemon.folder, worker_cls="tests.vllm.traced.TracedWorker"
        )
        of: Any = one["additional_config"]
        arguments.append({**one, "additional_config": {**of, "trace": str(pipe)}})
    return place.start(*arguments)


@contextmanager
def heard(place: Scene, name: str) -> Iterator[Any]:
    """Yields a wait for the first layer of that stage to compute."""
    pipe = os.open(pipe_of(place, name), os.O_RDONLY | os.O_NONBLOCK)

    def wait() -> None:
        assert select.select([pipe], [], [], harness.PATIENCE_S)[0], f"{name} computes nothing"

    try:
        yield wait
    finally:
        os.close(pipe)


def two_of_them(place: Scene) -> tuple[Daemon, Engine, Engine]:
    """Both engines on one daemon; most of the deeper one is evicted."""
    os.mkfifo(door(place.folder / "d0"))
    daemon = place.daemon(budget=BUDGET, program=HELD)
    late, other = start(place, daemon, LATE, OTHER)
    for engine in (late, other):
        engine.generate(REQUESTS[0], TOKENS)
        engine.step(1)  # without requests: it ends the turn, as in a server
    await_leases_back(daemon)
    return daemon, late, other


def begin_a_step(place: Scene, daemon: Daemon, late: Engine) -> None:
    """Have the deeper one compute its first layer, while its last part does not arrive."""
    order(daemon.folder, "hold", to_come(daemon))
    with heard(place, LATE) as first_layer:
        late.begin("generate", REQUESTS[1], TOKENS)
        first_layer()


def open_door(daemon: Daemon) -> None:
    os.close(os.open(door(daemon.folder), os.O_WRONLY))


def to_come(daemon: Daemon) -> int:
    """The number of absent parts."""
    return sum(one.state == "absent" for one in by_component(daemon)[LATE])


def coming(daemon: Daemon) -> int:
    """The number of parts that are being loaded."""
    return sum(one.state == "loading" for one in by_component(daemon)[LATE])


def test_layers_compute_while_the_last_are_still_to_come_and_a_daemon_killed_then_costs_no_token(
    place: Scene, expected_deep: Expected
) -> None:
    """The host copies have the parts that were not loaded."""
    daemon, late, other = two_of_them(place)
    assert to_come(daemon) > 2
    begin_a_step(place, daemon, late)
    assert coming(daemon) >= 1, "the last one is held"
    assert to_come(daemon) == 0, "all of them are ordered"
    open_door(daemon)
    assert late.result() == expected_deep[LATE][1]
    late.step(1)
    for engine in (other, late, other):
        assert engine.generate(REQUESTS[2], TOKENS) == expected_deep[engine.label][2]
        engine.step(1)
    assert "parts are still to come" in late.log
    await_leases_back(daemon)
    status = daemon.status()
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes

    begin_a_step(place, daemon, late)
    daemon.kill()
    assert late.result() == expected_deep[LATE][1]
    for engine in (late, other):
        assert engine.generate(REQUESTS[2], TOKENS) == expected_deep[engine.label][2]
    assert "goes on without swapd" in late.log


def test_a_load_that_fails_or_a_kill_inside_a_step_ends_that_stage_alone(
    place: Scene, expected_deep: Expected
) -> None:
    """And nothing wrong is said."""
    daemon, late, other = two_of_them(place)
    order(daemon.folder, "fail", to_come(daemon))
    late.begin("generate", REQUESTS[1], TOKENS)
    with pytest.raises(EngineFailed, match=r"was not loaded: .*the bus has failed"):
        late.result()
    await_leases_back(daemon)
    assert other.generate(REQUESTS[1], TOKENS) == expected_deep[OTHER][1]
    other.step(1)
    late.kill()
    await_components(daemon, OTHER)
    (again,) = start(place, daemon, LATE)
    assert again.generate(REQUESTS[2], TOKENS) == expected_deep[LATE][2]
    again.step(1)
    assert other.generate(REQUESTS[2], TOKENS) == expected_deep[OTHER][2]
    other.step(1)
    await_leases_back(daemon)

    begin_a_step(place, daemon, again)
    again.kill()
    other.begin("generate", REQUESTS[1], TOKENS)
    open_door(daemon)
    assert other.result() == expected_deep[OTHER][1]
    await_components(daemon, OTHER)
    (again,) = start(place, daemon, LATE)
    assert again.generate(REQUESTS[2], TOKENS) == expected_deep[LATE][2]
    assert daemon.status().quarantined_bytes == 0


def test_compiled_code_in_such_a_stage_computes_as_without_swapd(
    place: Scene, expected_deep: Expected
) -> None:
    model, daemon = place.models / LATE, place.daemon(budget=BUDGET)
    alone, stage = place.process(LATE), place.process(LATE)
    for engine, arguments in (alone, plain(model)), (stage, on_swapd(model, daemon.folder)):
        engine.imports("tests.vllm.compiling")
        engine.start(**arguments, hf_overrides={"architectures": ["CompilingQwen2"]})
    assert "begins its turns with the first of its layers" in stage.log
    for number in (0, 1):
        said = alone.generate(REQUESTS[number], TOKENS)
        assert said != expected_deep[LATE][number]
        assert stage.generate(REQUESTS[number], TOKENS) == said
