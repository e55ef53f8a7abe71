"""Which blocks of a KV cache are lost, and which requests would read them."""

from swapd_client.vllm.stage.lost_blocks import NOBODYS, LostBlocks, RequestStep

SIZE = 4


def share(
    name: str, table: list[int], computed: int, scheduled: int, *, anew: bool = False
) -> RequestStep:
    return RequestStep(name, [(table, SIZE)], computed, scheduled, anew)


def gone_of(*blocks: int) -> LostBlocks:
    made = LostBlocks()
    made.lose(blocks)
    return made


def test_what_was_lost_is_gone_until_it_was_written_anew() -> None:
    gone = gone_of(1, 2)
    assert gone.step([share("a", [1, 2, 3], 9, 1)]) == {1, 2}
    assert gone.step([share("a", [1, 2, 3], 0, 10)]) == set()
    assert gone.step([share("a", [1, 2, 3], 10, 2)]) == set()
    assert not gone


def test_a_request_reads_what_is_before_its_tokens_and_no_more() -> None:
    gone = gone_of(2)
    assert gone.step([share("a", [1, 2], 4, 1)]) == set(), "the second block is written, not read"
    assert gone.step([share("b", [2], 4, 1, anew=True)]) == {2}, "but for its first slot"
    assert gone.step([share("a", [1, 2], 5, 3)]) == set(), "whose slots are whole"
    assert not gone


def test_what_was_written_by_a_request_that_read_what_is_gone_is_gone() -> None:
    gone = gone_of(1)
    assert gone.step([share("a", [1, 2], 4, 4)]) == {1}
    assert gone.step([share("b", [2], 4, 1, anew=True)]) == {2}
    assert gone.step([share("c", [1, 2], 0, 8, anew=True), share("d", [2], 4, 1)]) == set()


def test_the_slots_before_it_are_not() -> None:
    gone = gone_of(1)
    assert gone.step([share("a", [1, 2], 6, 1)]) == {1}
    assert gone.step([share("b", [3, 2], 6, 1, anew=True)]) == set()
    assert gone.step([share("c", [2], 4, 1, anew=True)]) == {2}, "nobody wrote the last one"


def test_a_block_may_be_computed_again_by_a_request_before_in_the_same_step() -> None:
    gone = gone_of(1)
    both = [share("a", [1], 0, 4), share("b", [1, 2], 4, 1)]
    assert gone.step(both) == set()
    gone = gone_of(1)
    assert gone.step(reversed(both)) == {1}


def test_a_request_that_read_nothing_gone_is_looked_at_again_when_it_has_other_blocks() -> None:
    gone = gone_of(1, 2)
    assert gone.step([share("a", [3, 4], 5, 1)]) == set()
    assert gone.step([share("a", [1, 4], 5, 1, anew=True)]) == {1}
    assert gone.step([share("b", [5, 6], 5, 1)]) == set()
    gone.lose([5])
    assert gone.step([share("b", [5, 6], 6, 1)]) == {5}


def test_the_block_that_is_nobodys_is_never_gone() -> None:
    gone = gone_of(NOBODYS)
    assert not gone
    gone.lose([1])
    assert gone.step([share("a", [NOBODYS, 1], 8, 1)]) == {1}
    assert gone.step([share("b", [NOBODYS, 2], 8, 1)]) == set()


def test_groups_of_layers_have_blocks_of_their_own_sizes() -> None:
    gone = gone_of(7)
    assert gone.step([RequestStep("a", [([1], 8), ([3, 7], 4)], 4, 1, anew=True)]) == set()
    gone.lose([7])
    assert gone.step([RequestStep("a", [([1], 8), ([3, 7], 4)], 5, 1, anew=False)]) == {7}
