"""Since vLLM 0.32, a trainer can check that all weights of a real engine are those it sent.

The engine shares the device with another, so its weights are not always in.
"""

from collections.abc import Mapping

from tests.vllm.engines import REQUESTS, TOKENS, Scene

Expected = Mapping[str, list[list[list[int]]]]


def test_checksums_say_what_the_weights_are_and_a_reset_is_undone_by_a_reload(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    talker, thinker = scene.on_swapd(daemon, "talker", "thinker")
    (plain,) = scene.plain("talker")
    (as_plain,) = plain.call("compute_weight_checksums")
    assert thinker.generate(REQUESTS[0], TOKENS) == expected["thinker"][0]
    assert talker.call("compute_weight_checksums") == [as_plain]

    talker.call("reset_weights")
    plain.call("reset_weights")
    assert thinker.generate(REQUESTS[1], TOKENS) == expected["thinker"][1]
    (zero,) = talker.call("compute_weight_checksums")
    assert [zero] == plain.call("compute_weight_checksums")
    assert zero != as_plain
    assert talker.generate(REQUESTS[0], TOKENS) != expected["talker"][0]

    talker.call("reload_weights")
    assert thinker.generate(REQUESTS[2], TOKENS) == expected["thinker"][2]
    assert talker.call("compute_weight_checksums") == [as_plain]
    assert talker.generate(REQUESTS[3], TOKENS) == expected["talker"][3]
    assert daemon.status().bytes_out == 0
