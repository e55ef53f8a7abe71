"""A KV cache that takes turns: the blocks in use, and their places."""

from typing import Any
from unittest.mock import Mock

import pytest

from swapd_client.vllm.ranks import LossCounts
from swapd_client.vllm.stage.kv_cache import (
    BlocksInUse,
    Fate,
    KvTerms,
    Layer,
    StageCache,
    ranges_of,
)


def test_a_block_is_in_use_as_long_as_a_request_has_it() -> None:
    in_use = BlocksInUse(prefixes=False)
    in_use.has("a", ([1, 2],))
    in_use.has("b", ([4], [7, 8]))
    in_use.gets("a", ([3],))
    assert in_use.blocks == [1, 2, 3, 4, 7, 8]
    assert in_use.tables("a") == [[1, 2, 3]]
    assert in_use.tables("b") == [[4], [7, 8]]
    in_use.ended(["a"])
    assert in_use.tables("a") == []
    assert in_use.blocks == [4, 7, 8]
    in_use.has("b", ([5],))  # it was preempted, and has other blocks now
    assert in_use.blocks == [5]
    in_use.ended(["b", "never heard of"])
    assert in_use.blocks == []


def test_what_prefixes_are_looked_up_in_is_in_use_for_good() -> None:
    in_use = BlocksInUse(prefixes=True)
    in_use.has("a", ([1, 2],))
    in_use.ended(["a"])
    in_use.has("b", ([1, 5],))
    assert in_use.blocks == [1, 2, 5]
    in_use.has("b", ([1, 6],))  # it was preempted, and others may use its old prefix
    assert in_use.blocks == [1, 2, 5, 6]
    in_use.forget_prefixes()
    assert in_use.blocks == [1, 6]


def test_blocks_are_where_their_layers_have_them() -> None:
    by_layer = [Layer(0, 100), Layer(1000, 100)]
    assert ranges_of(by_layer, [0, 1, 4], 2000) == [(0, 200), (400, 100), (1000, 200), (1400, 100)]
    assert ranges_of(by_layer, [], 2000) == []
    by_block = [Layer(0, 200), Layer(100, 200)]  # a block has the shares of all layers
    assert ranges_of(by_block, [9], 2000) == [(1800, 200), (1900, 100)]


def test_terms_say_what_becomes_of_it() -> None:
    layers = [Layer(0, 1)]
    assert not KvTerms("drop", prefixes=False, layers=layers).saved
    assert "until no request is in flight" in str(KvTerms("drop", prefixes=False, layers=layers))
    assert "requests in flight" in str(KvTerms("auto", prefixes=False, layers=layers))
    assert str(KvTerms("save", False, layers, slice_s=2.0)).endswith("; a turn lasts 2 s")
    for fate in ("drop", "auto", "save"):
        unreported = str(KvTerms(fate, False, layers, unreported="set scheduler_cls: x"))
        assert "ends the stage: to have them computed again, set scheduler_cls: x" in unreported
    for terms in (KvTerms("auto", prefixes=True, layers=layers), KvTerms("save", False, layers)):
        assert terms.saved
        assert str(terms) == "and all blocks are saved"


def cache_of(fate: Fate) -> StageCache:
    """A cache in which a request has the first block."""
    component: Any = Mock(nbytes=100, lost=False)
    component.name = "thinker.kv"
    made = StageCache(component, KvTerms(fate, False, [Layer(0, 10)]), LossCounts())
    made.in_use.has("a", ([1],))
    return made


def lease(*, fresh: bool) -> Any:
    return Mock(fresh=lambda name: fresh)


@pytest.mark.parametrize("fate", ["drop", "auto", "save"])
def test_a_loss_is_one_that_somebody_would_read(fate: Fate) -> None:
    cache = cache_of(fate)
    cache.come(lease(fresh=False))
    assert cache.losses == 0
    cache.come(lease(fresh=True))
    cache.come(lease(fresh=True))
    assert cache.losses == 2
    cache.in_use.ended(["a"])
    cache.come(lease(fresh=True))
    assert cache.losses == (3 if fate == "save" else 2), "it keeps what requests leave"
    cache.come(lease(fresh=True))
    assert cache.losses == (3 if fate == "save" else 2), "nobody would read that any more"


@pytest.mark.parametrize(("fate", "losses"), [("drop", 1), ("auto", 0), ("save", 0)])
def test_what_is_never_saved_is_gone_with_the_daemon(fate: Fate, losses: int) -> None:
    cache = cache_of(fate)
    cache.go_alone()
    assert cache.losses == losses
