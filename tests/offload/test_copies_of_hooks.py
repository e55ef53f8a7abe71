"""Hooks and wrapped methods in copies of a module, and their cost in calls."""

import inspect

import torch

from swapd_client import Client
from tests.offload.modules import WIDTH, Decoder, leases, seeded

X = torch.ones(1, WIDTH)


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
