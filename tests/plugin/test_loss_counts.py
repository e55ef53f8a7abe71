"""The counts that the ranks of a stage share."""

from swapd_client.vllm.loss_counts import LossCounts, memory_for


def test_a_rank_reads_the_counts_of_all() -> None:
    with memory_for(3) as memory:
        first, second, third = (LossCounts(memory.fileno(), rank, 3) for rank in range(3))
    assert first.total == 0
    second.set(1)
    third.set(4)
    assert [one.total for one in (first, second, third)] == [5, 5, 5]
    second.set(2)
    del second  # this rank has ended
    assert first.total == 6


def test_vllm_listens_to_the_first_rank_alone() -> None:
    with memory_for(2) as memory:
        assert LossCounts(memory.fileno(), 0, 2).reports
        assert not LossCounts(memory.fileno(), 1, 2).reports
