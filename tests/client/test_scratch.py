"""Scratch in one process: its tensor, async, loops that keep leases, the next daemon."""

from typing import Any

import numpy
import pytest
import torch

import swapd_client
from swapd import spawn
from swapd_client import Component, InvalidSource
from swapd_client.memory import scratch
from tests.threads import started

MIB = 1 << 20


def evict(client: swapd_client.Client) -> None:
    """Load a component as large as the arena, so that all others leave."""
    client.acquire("filler").release()


def test_the_tensor_of_scratch_is_one_and_lies_at_its_address() -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        made = client.register_scratch("kv", "8MiB")
        assert made.tensor is made.tensor
        assert (made.tensor.dtype, made.tensor.shape) == (torch.uint8, (8 * MIB,))
        assert made.tensor.data_ptr() == made.address
        layers = made.tensor.view(torch.bfloat16).view(4, -1)
        with client.acquire("kv") as lease:
            assert lease.fresh("kv")
            assert not layers.any()
            layers[2] = 1.5
            assert layers.float().sum() == 1.5 * MIB
        assert client.status().components[0].kind == "scratch"


def test_what_is_no_scratch_has_no_tensor_of_its_own_and_nothing_to_say_is_used() -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        weights = client.register("w", {"x": torch.ones(MIB)})
        with pytest.raises(InvalidSource, match="is no scratch"):
            _ = weights.tensor
        with pytest.raises(InvalidSource, match="not saved in part"):
            weights.used([])
        for size in (1.5, numpy.array([MIB])):
            with pytest.raises(InvalidSource, match=r"scratch of .*: give a size"):
                client.register_scratch("kv", size)  # type: ignore[arg-type]
        kv = client.register_scratch("kv", MIB)
        for wrong in (lambda: kv.view("x"), lambda: kv.tensors):
            with pytest.raises(InvalidSource):
                wrong()


def test_a_size_may_be_an_integer_of_numpy() -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        size: Any = numpy.int64(MIB)
        assert client.register_scratch("kv", size).nbytes == MIB
        client.register_family("f", {"a": {"x": b"1"}}, resident=size)
        client.resize("f", size)
        client.acquire_workspace(size).release()


def test_a_range_that_is_used_is_checked_before_the_release_that_tells_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        kv = client.register_scratch("kv", "8MiB", mutable=True)
        client.register("filler", {"x": torch.ones(4 * MIB)})
        wrong: list[Any] = [(0, 1.5), (0, "1"), (0,), 7, (numpy.int64(0), 9 * MIB)]
        with client.acquire("kv"):
            kv.tensor[:2] = 7
            for one in wrong:
                with pytest.raises(InvalidSource, match="is no range"):
                    kv.used([one])
            kv.used([(numpy.int64(0), torch.tensor(1))])  # type: ignore[list-item]
        evict(client)
        with client.acquire("kv"):
            assert kv.tensor[:2].tolist() == [7, 0]
    assert not caplog.records


def test_what_a_loop_says_is_used_counts_when_it_has_given_its_lease_back() -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        kv = client.register_scratch("kv", "8MiB", mutable=True)
        client.register("filler", {"x": torch.ones(4 * MIB)})
        news = []
        for step in range(100):
            # kept for the next step; the daemon does not see it
            with client.acquire("kv") as lease:
                news.append(lease.fresh("kv"))
                kv.tensor[step] = step
                kv.used([(0, step + 1)])
        assert news == [True] + [False] * 99
        evict(client)
        with client.acquire("kv") as lease:
            assert not lease.fresh("kv")
            assert kv.tensor[:100].tolist() == list(range(100))
        assert client.status().bytes_out == 100


def test_what_much_scratch_of_one_lease_is_used_fits_into_one_message() -> None:
    names = [f"kv/{i}" for i in range(32)]
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        parts = [client.register_scratch(n, MIB, mutable=True, part_of="kv") for n in names]
        client.register("filler", {"x": torch.ones(16 * MIB)})
        with client.acquire("kv") as lease:
            assert lease.fresh("kv")
            for part in parts:
                part.tensor.fill_(7)
                part.used((at, 100) for at in range(0, MIB, 200))
        client.acquire("filler").release()
        with client.acquire("kv") as lease:
            assert not lease.fresh("kv")
            assert all(bool(part.tensor.view(-1)[:100].eq(7).all()) for part in parts)


def test_a_kept_lease_with_much_to_say_is_given_back_when_nobody_uses_it() -> None:
    """Its release is longer than a packet of the lifeline."""
    names = [f"kv/{i}".ljust(200, "\N{GRINNING FACE}") for i in range(90)]
    with spawn.daemon(budget="256MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        parts = [client.register_scratch(n, 4096, mutable=True, part_of="kv") for n in names]

        def use() -> None:
            for _ in range(3):
                with client.acquire("kv"):
                    for part in parts:
                        part.used([(0, 1)])

        started(use).join()
        assert client.leasing.cache.kept()
        with swapd_client.connect(daemon.folder) as other:
            other.acquire_workspace("256MiB", timeout=5).release()


@pytest.mark.parametrize("mutable", [False, True])
def test_scratch_that_lost_its_daemon_goes_to_the_next_at_the_same_address(
    *, mutable: bool
) -> None:
    with spawn.daemon(budget="16MiB") as daemon:
        client = swapd_client.connect(daemon.folder)
        tensor = client.register_scratch("kv", "8MiB", mutable=mutable).tensor
        address = tensor.data_ptr()
        with client.acquire("kv"):
            tensor.fill_(7)
    client.close()
    assert int(tensor[0]) == 7
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        again = client.register_scratch("kv", tensor, mutable=mutable)
        assert (again.tensor is tensor, again.address) == (True, address)
        with client.acquire("kv") as lease:
            assert lease.fresh("kv") is not mutable
            assert int(tensor.sum()) == (7 * 8 * MIB if mutable else 0)
            again.used([]) if mutable else None
        client.register("filler", {"x": torch.ones(4 * MIB)})
        evict(client)
        with client.acquire("kv") as lease:
            assert lease.fresh("kv")
            assert not tensor.any()


def test_a_tensor_that_never_was_scratch_is_refused_as_it() -> None:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        with pytest.raises(InvalidSource, match="cannot keep its address"):
            client.register_scratch("kv", torch.zeros(MIB, dtype=torch.uint8))
        made: Component = client.register_scratch("kv", MIB)
        with pytest.raises(InvalidSource):
            client.register_scratch("other", made.tensor)


def test_ranges_are_told_sorted_and_joined() -> None:
    assert scratch.told([(10, 5), (0, 4), (4, 2), (12, 9), (30, 0)], 100) == ((0, 6), (10, 11))
    assert scratch.told([], 100) == ()
    many = scratch.told(((at, 1) for at in range(0, 1 << 30, 1 << 16)), 1 << 30)
    assert len(many) <= 4096
    covered = [(start, start + n) for start, n in many]
    assert all(any(a <= at < b for a, b in covered[i : i + 1]) for i, at in _firsts(covered))


def _firsts(covered: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each requested range, the rounded range that contains it."""
    found, i = [], 0
    for at in range(0, 1 << 30, 1 << 16):
        while covered[i][1] <= at:
            i += 1
        found.append((i, at))
    return found
