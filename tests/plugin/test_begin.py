"""The short paths of `begin` and `end` take the same decisions as the full ones."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from swapd_client import WouldDeadlock
from swapd_client.vllm.stage import Stage, turns
from tests.guarantees.harness import Daemon
from tests.plugin.test_stage import Scene, daemon

__all__ = ["daemon"]

HISTORIES = 12
STEPS = 40
DOES = ("begin", "begin", "encode", "end", "end", "rest", "comes", "goes", "wanted", "unwanted")


@pytest.fixture
def scene(daemon: Daemon) -> Iterator[Scene]:
    scene = Scene(daemon)
    yield scene
    for stage in scene.stages:
        stage.close()


class Told:
    """A stage, with a record of its acquires and releases."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self._stage = stage
        self._acquire = stage.client.acquire
        self._running = 0
        self.refuses = False
        monkeypatch.setattr(stage.client, "acquire", self._recorded)

    def _recorded(self, *names: str, **options: Any) -> Any:
        parts = [name.partition(".")[2] for name in names]
        if self.refuses:
            self.refuses = False
            self.seen.append(("refused", parts))
            raise WouldDeadlock("as told")
        lease = self._acquire(*names, **options)
        release = lease.release

        def released() -> None:
            self.seen.append(("released", parts))
            release()

        lease.release = released  # type: ignore[method-assign]
        self.seen.append(("acquired", parts, options))
        return lease

    def do(self, what: str, around: AbstractContextManager[None]) -> None:
        stage, wanted = self._stage, self._stage.client.session.told.wanted
        with around:
            match what:
                case "begin" | "encode":
                    stage.begin(encoders=what == "encode")
                case "end":
                    stage.end()
                case "rest":
                    stage.rest()
                case "comes":
                    self._running += 1
                    stage.note([str(self._running)], [])
                case "goes":
                    stage.note([], [str(self._running)])
                case "wanted":
                    wanted.update(stage.components.main)
                case "unwanted":
                    wanted.clear()
        keeping = stage._turns.keeping._asked is not None
        state = stage._gate.depth, stage._stepping, stage._turns.held, keeping
        self.seen.append((what, *state))


def history(stage: Stage, seed: int) -> list[Any]:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        told = Told(stage, patched)
        for _ in range(STEPS):
            told.refuses = rng.random() < 0.03
            around = stage.using() if rng.random() < 0.1 else nullcontext()
            try:
                told.do(rng.choice(DOES), around)
            except WouldDeadlock as exc:
                told.seen.append(str(exc))
        told.refuses = False
        stage.client.session.told.wanted.clear()
        stage.end()
        stage.note([], [str(n) for n in range(STEPS + 1)])
        stage.rest()
    return told.seen


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_step_holds_what_it_would_hold_in_full(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(turns, "IDLE_S", 1000.0)  # it gives way at steps only, not by time
    stage, _ = scene.stage("stage")
    seen = history(stage, seed)
    monkeypatch.setattr(Stage, "begin", Stage.begin_in_full)
    monkeypatch.setattr(Stage, "end", Stage.end_in_full)
    assert seen == history(stage, seed)
    assert any(one[0] == "acquired" for one in seen)
