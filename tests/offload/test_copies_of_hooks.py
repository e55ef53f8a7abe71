"""Hooks and wrapped methods in copies of a module, and their cost in calls."""

import copy
import inspect
import pickle
from typing import Any

import torch

from swapd_client import Client
from swapd_client.offload.hooks import Method
from swapd_client.offload.shortcuts import Enter, Leave
from tests.offload.modules import WIDTH, Decoder, leases, seeded

X = torch.ones(1, WIDTH)


def parts_of(module: Any) -> list[Any]:
    """All attributes of swapd on one module."""
    return [
        *(h for h in module._forward_pre_hooks.values() if isinstance(h, Enter)),
        *(h for h in module._forward_hooks.values() if isinstance(h, Leave)),
        module.decode,
    ]


def test_copied_and_unpickled_hooks_hold_nothing(client: Client) -> None:
    model = seeded(Decoder)
    with client.attach({"vae": model}):
        enter, leave, decode = parts_of(model)
        for inert in (copy.copy(enter), copy.deepcopy(enter), pickle.loads(pickle.dumps(enter))):
            assert inert(model, (X,)) is None
            assert not client.session.leases
        for inert in (copy.deepcopy(leave), pickle.loads(pickle.dumps(leave))):
            assert inert(model, (X,), X) is None
        assert isinstance(decode, Method)


def test_a_wrapped_method_looks_like_the_method(client: Client) -> None:
    model = seeded(Decoder)
    before = inspect.signature(model.decode)
    with client.attach({"vae": model}):
        assert inspect.signature(model.decode) == before
        assert model.decode.__name__ == "decode"
        assert model.decode.__doc__ == Decoder.decode.__doc__
        assert "decode" in repr(model.decode)


def test_a_method_that_the_instance_had_is_the_one_that_is_wrapped(client: Client) -> None:
    model = seeded(Decoder)
    patched = lambda x: ("patched", x)  # noqa: E731
    model.decode = patched
    with client.attach({"vae": model}):
        assert model.decode(X)[0] == "patched"
        assert leases(client) == {"vae": 0}
    assert model.decode is patched
