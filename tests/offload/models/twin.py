"""A model runs as it does without swapd, bit for bit, on a device that does not hold it."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from swapd.shared import protocol
from swapd_client import connect
from tests.guarantees.harness import Daemon
from tests.offload.models.weights import nbytes

Outputs = dict[str, torch.Tensor]


class Twin(NamedTuple):
    """A model, a function that runs it once, and its output without swapd."""

    model: Any
    run: Callable[[], Outputs]
    expected: Outputs
    weights_bytes: int


@cache
def twin(build: Callable[[], tuple[Any, Callable[[], Outputs]]]) -> Twin:
    """Built once, for all tests: each leaves it unchanged."""
    model, run = build()
    expected = run()
    assert all(value.isfinite().all() for value in expected.values())
    return Twin(model, run, expected, sum(nbytes(part) for part in modules(model).values()))


def modules(model: Any) -> dict[str, torch.nn.Module]:
    """A pipeline's modules; a module is its own."""
    if isinstance(model, torch.nn.Module):
        return {"": model}
    return {k: v for k, v in model.components.items() if isinstance(v, torch.nn.Module)}


def check_swapped(
    daemon: Daemon, subject: Twin, rounds: int = 2, **strategy: Any
) -> protocol.Status:
    """Run it attached by `strategy`, then detached; return the status after the last round."""
    pointers = _pointers(subject)
    with (
        connect(daemon.folder, label="model") as client,
        client.attach(subject.model, **strategy),
    ):
        for _ in range(rounds):
            assert_equal(subject.run(), subject.expected)
        status = client.status()
    assert_equal(subject.run(), subject.expected)
    assert len(_pointers(subject)) == len(pointers)  # tied parameters stay tied
    assert status.evictions > 0
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes < subject.weights_bytes
    return status


def assert_equal(seen: Outputs, expected: Outputs) -> None:
    """The same names, and the same bits."""
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(seen[name], value), name


def _pointers(subject: Twin) -> set[int]:
    parts = modules(subject.model).values()
    return {p.data_ptr() for part in parts for p in part.parameters()}
