"""A KV cache that takes turns: which of its blocks hold something, and where they are."""

from swapd_client.vllm.stage.cache import InUse, Layer, Terms, ranges_of

MIB = 1 << 20


def test_a_block_is_in_use_as_long_as_a_request_has_it() -> None:
    in_use = InUse(prefixes=False)
    in_use.has("a", ([1, 2],))
    in_use.has("b", ([4], [7, 8]))
    in_use.gets("a", ([3],))
    assert in_use.blocks == [1, 2, 3, 4, 7, 8]
    in_use.ended(["a"])
    assert in_use.blocks == [4, 7, 8]
    in_use.has("b", ([5],))  # it was preempted, and has others now
    assert in_use.blocks == [5]
    in_use.ended(["b", "never heard of"])
    assert in_use.blocks == []


def test_what_prefixes_are_looked_up_in_is_in_use_for_good() -> None:
    in_use = InUse(prefixes=True)
    in_use.has("a", ([1, 2],))
    in_use.ended(["a"])
    in_use.has("b", ([1, 5],))
    assert in_use.blocks == [1, 2, 5]
    in_use.has("b", ([1, 6],))  # it was preempted, and others may begin with what it had
    assert in_use.blocks == [1, 2, 5, 6]
    in_use.forget_prefixes()
    assert in_use.blocks == [1, 6]


def test_a_request_that_has_ended_gets_no_blocks() -> None:
    in_use = InUse(prefixes=False)
    in_use.gets("a", ([1],))
    assert in_use.blocks == []


def test_blocks_are_where_their_layers_have_them() -> None:
    by_layer = [Layer(0, 100), Layer(1000, 100)]
    assert ranges_of(by_layer, [0, 1, 4], 2000) == [(0, 200), (400, 100), (1000, 200), (1400, 100)]
    assert ranges_of(by_layer, [], 2000) == []
    by_block = [Layer(0, 200), Layer(100, 200)]  # a block has the shares of all layers
    assert ranges_of(by_block, [9], 2000) == [(1800, 200), (1900, 100)]


def test_terms_say_what_becomes_of_it() -> None:
    layers = [Layer(0, 1)]
    assert not Terms("drop", prefixes=False, layers=layers).saved
    assert "until no request is in flight" in str(Terms("drop", prefixes=False, layers=layers))
    assert "requests in flight" in str(Terms("auto", prefixes=False, layers=layers))
    for terms in (Terms("auto", prefixes=True, layers=layers), Terms("save", False, layers)):
        assert terms.saved
        assert str(terms) == "and what is in it is saved"
