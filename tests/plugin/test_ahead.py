"""A stage has the next one loaded while it computes: the message, and when it is sent.

`tests/vllm/test_ahead.py` has three engines that come in for one another.
"""

import pytest

from swapd_client.vllm.neighbours import in_order
from swapd_client.vllm.options import options_of
from swapd_client.vllm.stage import Stage
from tests.plugin.test_stage import Model, Scene

ORDER = ("thinker", "talker", "code2wav")


def talker(scene: Scene, name: str = "talker", order: tuple[str, ...] = ORDER) -> Stage:
    options = options_of({"swapd": {"endpoint": str(scene.daemon.folder)}}, name)
    neighbours = in_order(order, "talker")
    scene.stages.append(Stage.connect(options, name, gpu=None, neighbours=neighbours))
    scene.stages[-1].memory.take({"": Model()})
    return scene.stages[-1]


def begin(stage: Stage, request: str) -> None:
    """Give the stage a request, and make its first step."""
    stage.note([request], [])
    stage.begin()
    stage.end()


@pytest.mark.parametrize("rank", ["", ".tp1"])
def test_each_request_asks_for_the_next_stage_whether_it_is_there_or_not(
    scene: Scene, rank: str
) -> None:
    stage = talker(scene, f"talker{rank}")
    for request in "12":  # the second one joins the turn
        begin(stage, request)
        asked = scene.daemon.await_record("Prefetch")
        for names, called in ((asked.names, "code2wav"), (asked.over, "thinker")):
            assert {*names} == {f"{called}{of}{kv}" for of in ("", rank) for kv in ("", ".kv")}
    assert not scene.daemon.watch.seen("Refuse")


def test_without_a_daemon_an_order_or_a_request_it_asks_for_nothing(scene: Scene) -> None:
    with talker(scene).using():
        pass
    begin(talker(scene, "another", order=()), "1")
    assert not scene.daemon.watch.seen("Prefetch")
    scene.daemon.kill()
    begin(scene.stages[0], "2")
    assert scene.stages[0].alone
