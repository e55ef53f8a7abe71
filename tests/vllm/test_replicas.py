"""Four real engines of one model, by names of their own: one host copy, one on the device."""

from tests.vllm.engines import REQUESTS, TOKENS, Scene, on_swapd
from tests.vllm.test_turns import Expected

REPLICAS = 4


def test_four_engines_of_one_model_have_its_weights_once_and_answer_at_once(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    model = scene.models / "thinker"
    names = [f"thinker-{number}" for number in range(REPLICAS)]
    engines = scene.start(*(on_swapd(model, daemon.folder, {"component": name}) for name in names))
    loaded = daemon.status().bytes_in  # engines borrow memory to start, one after the other
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    for engine in engines:
        assert [tokens for tokens, _, _ in engine.result()] == expected["thinker"]
    status = daemon.status()
    weights = {c.name: c.nbytes for c in status.components}
    assert sorted(weights) == names
    (nbytes,) = set(weights.values())
    whole = -(-nbytes // status.chunk_bytes) * status.chunk_bytes
    assert (status.used_bytes, status.bytes_in) == (whole, loaded)
    assert nbytes <= status.host_copy_bytes < 1.01 * nbytes
