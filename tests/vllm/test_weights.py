"""A real engine gets new weights while another shares the device."""

from collections.abc import Mapping
from pathlib import Path

from tests.vllm.engines import REQUESTS, TOKENS, Scene, plain

Expected = Mapping[str, list[list[list[int]]]]


def test_reloaded_weights_are_what_is_computed_with(
    scene: Scene, expected: Expected, other: Path
) -> None:
    (alone,) = scene.start(plain(other))
    daemon = scene.daemon()
    talker, thinker = scene.on_swapd(daemon, "talker", "thinker")
    assert talker.generate(REQUESTS[0], TOKENS) == expected["talker"][0]
    talker.call("reload_weights", None, str(other))
    assert thinker.generate(REQUESTS[0], TOKENS) == expected["thinker"][0]
    again = talker.generate(REQUESTS[1], TOKENS)
    assert again == alone.generate(REQUESTS[1], TOKENS)
    assert again != expected["talker"][1]
    assert daemon.status().bytes_out == 0
