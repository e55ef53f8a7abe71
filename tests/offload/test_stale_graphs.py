"""Code compiled for a module without hooks never runs for an attached one.

torch finds compiled code by the code object and by guards, which ignore hooks
(`torch._dynamo.config.skip_nnmodule_hook_guards`). Run without a lease it reads absent weights: a
fault. So each case runs in a process of its own.
"""

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # from then on attached modules have a forward of their own

from swapd_client import Client
from tests.guarantees.harness import Daemon
from tests.offload.modules import TOKENS, Encoder, computed, seeded
from tests.offload.nursery import Nursery

PROGRAM = Path(__file__).parent / "programs" / "stale_graphs.py"

CASES = [
    "another_one_was_compiled_before",
    "it_was_compiled_itself_before",
    "a_function_that_calls_it_was_compiled_before",
    "both_are_attached",
    "it_was_compiled_while_it_was_attached_and_is_detached",
    "blocks_were_compiled_in_place",
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("tests.offload.compiled_once", "tests.offload.modules")
    yield nursery
    nursery.close()


@pytest.mark.parametrize("case", CASES)
def test_code_compiled_without_its_hooks_never_runs(
    nursery: Nursery, daemon: Daemon, case: str
) -> None:
    status, said = nursery.run(PROGRAM, case, daemon.folder)
    assert status == 0, said
    assert said.count("a way") == 3


def test_a_module_whose_compiled_twin_is_attached_can_be_called_itself(
    nursery: Nursery, daemon: Daemon
) -> None:
    status, said = nursery.run(PROGRAM, "twins", daemon.folder)
    assert status == 0, said


def test_its_forward_is_that_of_the_class_whatever_becomes_of_that(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patched(Encoder):
        def forward(self, tokens: torch.Tensor, scale: int = 1) -> torch.Tensor:
            """The documentation of forward."""
            return super().forward(tokens) * scale

    model, expected = computed(TOKENS, Patched)
    with client.attach({"text_encoder": model}):
        assert list(inspect.signature(model.forward).parameters) == ["tokens", "scale"]
        assert model.forward.__doc__ == "The documentation of forward."
        assert model.forward.__self__ is model
        monkeypatch.setattr(Patched, "forward", lambda self, x: Encoder.forward(self, x) + 1)
        assert torch.equal(model(TOKENS), expected + 1)
        assert "forward" not in vars(copy.deepcopy(model))
        assert "forward" not in vars(pickle.loads(pickle.dumps(model.norm)))
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_a_forward_that_somebody_gave_it_stays(client: Client) -> None:
    model = seeded(Encoder)

    def before(x: torch.Tensor) -> torch.Tensor:
        return x

    def after(x: torch.Tensor) -> torch.Tensor:
        return x

    model.norm.forward = before
    with client.attach({"text_encoder": model}):
        assert model.norm.forward is before
        model.embed.forward = after
    assert model.norm.forward is before
    assert model.embed.forward is after
