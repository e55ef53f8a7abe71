"""A KV cache that takes turns: the places of its blocks. `tests/vllm/test_kv.py` has the rest."""

from swapd_client.vllm.stage.kv_cache import Layer, ranges_of


def test_blocks_are_where_their_layers_have_them() -> None:
    by_layer = [Layer(0, 100), Layer(1000, 100)]
    assert ranges_of(by_layer, [0, 1, 4], 2000) == [(0, 200), (400, 100), (1000, 200), (1400, 100)]
    assert ranges_of(by_layer, [], 2000) == []
    by_block = [Layer(0, 200), Layer(100, 200)]  # a block has the shares of all layers
    assert ranges_of(by_block, [9], 2000) == [(1800, 200), (1900, 100)]
