"""A collected model is detached, and garbage that holds a lease releases it, at any point of the
collecting thread; a living model stays attached, with or without its attachment.
"""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torchs

from swapd_client import Client, SessionFenced, connect, finalizers
from swapd_client.offload.scope import here
from tests import threads
from tests.guarantees.harness import Daemon
from tests.guarantees.relay import Relay
from tests.offload.modules import (
    TOKENS,
    Encoder,
    Model,
    assert_comes_back,
    await_none_leased,
    computed,
    evict,
    leases,
    seeded,
)
from tests.offload.test_attach import names


def await_none(client: Client) -> None:
    """A thread unregisters soon; it has the memory for itself once the daemon has answered."""
    while names(client):
        pass
    finalizers.settle()  # waits for that thread


@pytest.mark.parametrize("options", [{}, {"resident": {"transformer": 0, "text_encoder": 0}}])
def test_the_components_of_a_model_that_is_no_more_are_unregistered(
    client: Client, options: dict[str, Any]
) -> None:
    before = client.status().private_bytes  # of other tests, which this process may still have
    model = seeded(Model)
    client.attach(model, blocks={"transformer": ["0", "1", "2"]} if options else None, **options)
    model(TOKENS)
    model.state_dict()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    await_none(client)
    while client.status().private_bytes > before:
        pass
    assert not client.session.components
    finalizers.settle()
    assert not torchs._global_parameter_registration_hooks


def test_an_attachment_that_nobody_keeps_works_as_long_as_its_model(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    gone = weakref.ref(client.attach(model))
    encoder = model.text_encoder
    gc.collect()
    assert gone() is not None
    assert_comes_back(client, model, TOKENS, expected, "text_encoder", "transformer", "vae")
    del model  # a part of it remains, with its hooks
    gc.collect()
    evict(client, "text_encoder")
    encoder(TOKENS)
    assert names(client) == {"text_encoder", "transformer", "vae"}


def test_an_attachment_that_is_kept_keeps_its_model_and_detaches_it(client: Client) -> None:
    model, expected = computed(TOKENS, Model)
    attachment = client.attach(model)
    living = weakref.ref(model)
    del model
    gc.collect()
    evict(client, "text_encoder", "transformer", "vae")
    kept = living()
    assert kept is not None
    assert torch.equal(kept(TOKENS), expected)
    attachment.detach()
    assert not names(client)
    assert torch.equal(kept(TOKENS), expected)


def test_a_tensor_that_somebody_kept_is_private_memory_afterwards(client: Client) -> None:
    model = seeded(Model)
    value = model.transformer[0].weight
    expected = value.clone()
    client.attach(model)
    address = value.data_ptr()
    del model
    gc.collect()
    await_none(client)
    assert value.data_ptr() == address
    assert torch.equal(value, expected)


def test_the_next_model_may_have_the_same_names_at_once(client: Client) -> None:
    gc.disable()
    try:
        for seed in range(2):
            torch.manual_seed(seed)
            model = Model().requires_grad_(False)
            expected = model(TOKENS)
            client.attach(model)
            assert_comes_back(client, model, TOKENS, expected, "text_encoder", "transformer", "vae")
    finally:
        gc.enable()


def test_what_is_in_use_elsewhere_stays_and_is_named(
    daemon: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Model)
    client.attach(model, ["vae"])
    with connect(daemon.folder, label="other") as other, other.acquire("vae"):
        del model
        gc.collect()
        while "stays registered, though its model is no more" not in caplog.text:
            pass
        assert "client.unregister('vae') makes it private" in caplog.text
    client.unregister("vae")


def test_on_a_gpu_they_stay_and_that_is_said(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Model)
    client.attach(model, ["vae"])
    with monkeypatch.context() as patched:
        patched.setattr(client.session.processor, "memory_is_scarce", True)
        del model
        gc.collect()
        while "'vae' stays registered, though its model is no more" not in caplog.text:
            pass
    assert names(client) == {"vae"}
    client.unregister("vae")


def test_a_model_that_goes_with_its_client_says_nothing(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "swapd_client"):
        client = connect(daemon.folder, label="mine")
        session = client.session
        model = seeded(Model)
        client.attach(model)
        client.close()
        del model, client
        gc.collect()
    assert session.error is not None
    assert not caplog.records


# --- what a call left --------------------------------------------------------------------


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("resident", [None, 0], ids=["whole", "streamed"])
def test_whoever_collects_what_a_call_left_may_hold_any_lock(
    client: Client, resident: int | None
) -> None:
    model = seeded(Encoder, 4)

    def run() -> None:
        """Is interrupted. Its lease and its holder form a cycle, as errors make them."""
        with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        cycle: list[object] = [here()]
        cycle.append(cycle)

    collected = threading.Event()

    def collect() -> None:
        with client.session.life.lock:
            gc.collect()
        collected.set()

    with client.attach({"dit": model}, resident=resident):
        hook = model.layers[1].register_forward_hook(interrupted)
        gc.disable()
        try:
            threads.started(run).join()
            threading.Thread(target=collect, daemon=True).start()
            assert collected.wait(60)
        finally:
            gc.enable()
        hook.remove()
        await_none_leased(client)


class Decoding(torch.nn.Module):
    """Yields a token at a time, and holds its weights in between."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            yield (x := self.head(x))


def test_what_only_garbage_holds_is_not_in_use(client: Client) -> None:
    """Detaching waits for releases that a busy thread has not come to."""
    model, queue, refused = seeded(Decoding), finalizers._collected.queue, threading.Event()

    def be_busy() -> None:
        while queue.qsize() < 2 and not refused.is_set():  # the release, and who waits for it
            pass

    attachment = client.attach({"dit": model})
    steps = model(torch.ones(1, 4))
    next(steps)
    finalizers.give_back_later(be_busy)
    del steps
    gc.collect()
    try:
        attachment.detach()
    finally:
        refused.set()


def ask_for_ever(client: Client) -> None:
    while True:
        client.status()


def test_garbage_whose_release_fails_keeps_no_other_from_its_release(
    client: Client, daemon: Daemon
) -> None:
    """The release raises in a session that has ended, in a thread without a caller."""
    fenced_model, model = seeded(Decoding), seeded(Decoding)
    x = torch.ones(1, 4)
    with (
        Relay(daemon.folder.with_name("relay"), daemon.folder) as relay,
        connect(relay.folder) as fenced,
        client.attach({"other": model}),
    ):
        fenced.attach({"dit": fenced_model})
        steps = fenced_model(x)
        next(steps)
        relay.send_garbage()
        with pytest.raises(SessionFenced):
            ask_for_ever(fenced)
        del steps
        gc.collect()

        steps = model(x)
        next(steps)
        assert leases(client)["other"] == 1
        del steps
        gc.collect()
        await_none_leased(client)
