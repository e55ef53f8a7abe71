"""The next stage loads while one computes, and disturbs no other. Without vLLM."""

from pathlib import Path
from typing import Any

import pytest

from swapd_client.vllm.neighbours import in_order
from swapd_client.vllm.options import options_of
from swapd_client.vllm.stage import Stage
from tests.guarantees.harness import Daemon
from tests.plugin.test_stage import Model, Scene, daemon, leases, patient, resident, scene

__all__ = ["daemon", "patient", "scene"]  # fixtures

ORDER = ("thinker", "talker", "code2wav")


class Pipeline:
    """Stages of 10 MiB each, on a daemon whose budget is for one of them by default."""

    def __init__(self, scene: Scene, *names: str, order: tuple[str, ...] = ORDER) -> None:
        self.scene = scene
        self.order = order
        self.stages = {name: self.start(name) for name in names}

    def start(self, name: str) -> Stage:
        endpoint = {"swapd": {"endpoint": str(self.scene.daemon.folder)}}
        options = options_of(endpoint, name)
        stage = Stage.connect(options, name, gpu=None, neighbours=in_order(self.order, name))
        self.scene.stages.append(stage)
        stage.memory.take({"": Model()})
        return stage

    def begin(self, name: str, request: str) -> None:
        """Give the stage a request, and make its first step."""
        self.stages[name].note([request], [])
        self.stages[name].begin()
        self.stages[name].end()

    def finish(self, name: str, request: str) -> None:
        """End a request, as vLLM does after the last step."""
        self.stages[name].note([], [request])
        self.stages[name].rest()

    def pass_through(self, name: str, request: str) -> None:
        self.begin(name, request)
        self.finish(name, request)


@pytest.fixture
def roomy(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A daemon with room for two of three stages."""
    made = Daemon(tmp_path / "d", tmp_path / "log", budget="22MiB")
    yield made
    made.discard()


def copies_in(daemon: Daemon) -> list[str]:
    return [copy.name for copy in daemon.watch.seen("CopyIn")]


def test_the_next_one_comes_in_the_place_of_the_one_before(roomy: Daemon) -> None:
    scene = Scene(roomy)
    pipeline = Pipeline(scene, *ORDER)
    pipeline.pass_through("thinker", "1")
    before = len(copies_in(roomy))
    pipeline.begin("talker", "1")
    roomy.await_record("CopyIn", name="code2wav")
    evicted = [one.name for one in roomy.watch.seen("Evict")][-1:]
    assert evicted == ["thinker"]
    assert leases(roomy) == {"talker": 1}, "nobody holds what is expected"
    pipeline.finish("talker", "1")
    while "code2wav" not in resident(roomy):
        roomy.await_record("CopiedIn")
    copied = copies_in(roomy)[before:]
    pipeline.begin("code2wav", "1")
    roomy.await_record("CopyIn", name="thinker")
    assert copies_in(roomy)[before:] == [*copied, "thinker"], "it found itself there"
    scene.close()


def test_a_stage_that_others_have_room_beside_pushes_nobody_out(scene: Scene) -> None:
    """There is room for one: the next stage loads when it acquires."""
    pipeline = Pipeline(scene, *ORDER)
    pipeline.begin("thinker", "1")
    assert resident(scene.daemon) == {"thinker"}
    pipeline.finish("thinker", "1")


def test_names_that_are_not_there_are_no_harm(scene: Scene) -> None:
    pipeline = Pipeline(scene, "talker")
    pipeline.pass_through("talker", "1")
    asked = scene.daemon.await_record("Prefetch")
    assert asked.names == ("code2wav", "code2wav.kv")
    assert asked.over == ("thinker", "thinker.kv")
    assert not scene.daemon.watch.seen("Refuse")


def test_a_stage_that_lost_its_daemon_asks_for_nothing(scene: Scene) -> None:
    pipeline = Pipeline(scene, "talker")
    pipeline.pass_through("talker", "1")
    scene.daemon.kill()
    pipeline.pass_through("talker", "2")
    assert pipeline.stages["talker"].alone


def test_requests_that_join_a_turn_have_the_next_one_brought_in_again(scene: Scene) -> None:
    pipeline = Pipeline(scene, "talker")
    pipeline.begin("talker", "1")
    scene.daemon.await_record("Prefetch")
    pipeline.begin("talker", "2")
    scene.daemon.await_record("Prefetch")


def test_calls_that_are_for_no_request_bring_in_nothing(scene: Scene) -> None:
    pipeline = Pipeline(scene, "talker")
    with pipeline.stages["talker"].using():
        pass
    assert not scene.daemon.watch.seen("Prefetch")


def test_without_an_order_nothing_is_expected(scene: Scene) -> None:
    pipeline = Pipeline(scene, "talker", order=())
    pipeline.pass_through("talker", "1")
    assert not scene.daemon.watch.seen("Prefetch")


def test_a_rank_expects_its_own_rank_of_the_next_stage(scene: Scene) -> None:
    options = options_of({"swapd": {"endpoint": str(scene.daemon.folder)}}, "talker.tp1")
    neighbours = in_order(ORDER, "talker")
    stage = Stage.connect(options, "talker.tp1", gpu=None, neighbours=neighbours)
    scene.stages.append(stage)
    stage.memory.take({"": Model()})
    stage.note(["1"], [])
    stage.begin()
    stage.end()
    names = scene.daemon.await_record("Prefetch").names
    assert set(names) == {"code2wav", "code2wav.kv", "code2wav.tp1", "code2wav.tp1.kv"}
