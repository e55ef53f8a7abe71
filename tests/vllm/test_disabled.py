"""With SWAPD_DISABLE=1 the worker classes of swapd are vLLM's own."""

from pathlib import Path

from swapd.shared.config import DISABLE_VARIABLE
from tests.vllm.engines import REQUESTS, TOKENS, Scene, on_swapd, plain

SAID = "without swapd, as $SWAPD_DISABLE says"


def test_an_engine_with_swapds_worker_says_what_one_with_vllms_says(scene: Scene) -> None:
    model, theirs = scene.models / "talker", "vllm.v1.worker.cpu_worker.CPUWorker"
    (own,) = scene.start(plain(model, worker_cls=theirs))
    given = on_swapd(model, Path("/no/daemon"), {"kv": "auto"})
    (off,) = scene.start(given, **{DISABLE_VARIABLE: "1"})
    for few in REQUESTS:
        assert off.generate(few, TOKENS) == own.generate(few, TOKENS)
    assert SAID in off.log
    assert SAID not in own.log
