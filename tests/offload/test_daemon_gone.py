"""A model whose daemon ends joins the next daemon in its place at its next call, by itself."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapd_client
from swapd.daemon.host_copies import NAME
from swapd_client import ClientClosed, DaemonGone, NotRunning, TooLarge
from swapd_client.memory import ranges
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.scope import here
from swapd_client.session.registry import Registry
from tests.guarantees.harness import PATIENCE_S
from tests.interrupts import interrupt, interrupts, places
from tests.lives import Lives, living
from tests.offload.modules import TOKENS, WIDTH, Decoder, Model, computed, evict, seeded
from tests.threads import started

NEXT = "once no lease is in use, the next call joins it"
AGAIN = "models stay attached: the next call tries again"
HOW: list[dict[str, Any]] = [{}, {"blocks": ["0", "1", "2"], "resident": 0}]
whole_and_streamed = pytest.mark.parametrize("how", HOW, ids=["whole", "streamed"])


@pytest.fixture
def lives() -> Iterator[Lives]:
    with living(reconnect=0) as made:
        yield made


class Alive(nn.Module):
    """A DiT around which everything is attached, as one component; it may call back in the
    middle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.between()
        return self.last(x)  # type: ignore[no-any-return]


X = torch.ones(2, WIDTH)

#: Functions by which a call joins the next daemon.
TO_THE_NEXT = {"_daemon_gone", "_join_next", "join_next", "_await_end"}


def addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def host_copies() -> set[int]:
    """Those that this process has open, by inode."""
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return {one.stat().st_ino for one in links if NAME in os.readlink(one)}


def is_right(model: nn.Module, *args: Any) -> bool:
    """Whether it computes what one from the same seed does."""
    with torch.no_grad():
        return torch.equal(model(TOKENS), seeded(Model)(TOKENS))


@whole_and_streamed
def test_one_that_dies_between_two_calls_is_replaced_without_an_error(
    lives: Lives, how: dict[str, Any]
) -> None:
    model = seeded(Model)
    attachment = lives.client.attach(model, prefix="m", **how)
    objects, before, names = list(model.parameters()), addresses(model), lives.names()
    assert is_right(model)
    for _ in range(3):
        lives.next()
        assert is_right(model)
        assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
        assert addresses(model) == before
        assert lives.names() == names
        for name in names:
            evict(lives.client, name)
        assert is_right(model), "loaded again, from the host copies of the next daemon"
    attachment.detach()
    assert not lives.names()
    assert addresses(model) == before
    assert is_right(model)


@whole_and_streamed
def test_one_that_dies_in_a_call_costs_one_explained_error_at_most(
    lives: Lives, how: dict[str, Any]
) -> None:
    model = seeded(Model)
    lives.client.attach(model, **how)
    before = addresses(model)
    once: list[Callable[[], object]] = [lives.kill]

    def die(*_: object) -> None:
        if once:
            once.pop()()

    model.transformer[1].register_forward_hook(die)
    with pytest.raises((DaemonGone, NotRunning), match=f"{NEXT}|{AGAIN}"):
        model(TOKENS)
    assert here().entries == []
    lives.start()
    assert is_right(model)
    assert addresses(model) == before
    once.append(lives.next)
    assert is_right(model), "it computes on what it holds; the next part finds the next daemon"
    assert addresses(model) == before


def test_a_pass_that_holds_a_part_of_its_component_ends_in_the_explained_error(
    lives: Lives,
) -> None:
    model = seeded(Model).text_encoder
    wanted = model(TOKENS)
    lives.client.attach({"encoder": model}, blocks=["layers"], resident=0)
    hook = model.layers[0].register_forward_hook(lambda *_: lives.next())
    with pytest.raises(DaemonGone, match=NEXT):
        model(TOKENS)
    hook.remove()
    assert torch.equal(model(TOKENS), wanted)


def test_while_none_runs_calls_say_so_and_the_weights_are_there(lives: Lives) -> None:
    model = seeded(Model)
    lives.client.attach(model)
    before, wanted = addresses(model), seeded(Model).state_dict()
    lives.kill()
    for _ in range(2):
        with pytest.raises(NotRunning, match=f"Start one: swapd serve --device host.*{AGAIN}"):
            model(TOKENS)
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name])
    lives.start()
    assert is_right(model)
    assert addresses(model) == before


def test_one_that_is_stopped_is_replaced_as_one_that_died(lives: Lives) -> None:
    model = seeded(Model)
    lives.client.attach(model)
    assert is_right(model)
    lives.daemon.terminate()
    lives.client.session.life.await_end()
    lives.daemon.kill()
    with pytest.raises(NotRunning, match=AGAIN):
        model(TOKENS)
    lives.start()
    assert is_right(model)


def test_one_that_refuses_the_weights_leaves_them_private_and_attached(lives: Lives) -> None:
    model, large = seeded(Model), nn.Linear(2000, 2000).requires_grad_(requires_grad=False)
    lives.client.attach({"model": model, "large": large})
    before, wanted = addresses(large), large(torch.ones(2000))
    lives.next(budget="8MiB")
    for _ in range(2):
        with pytest.raises(TooLarge, match=f"large needs 16 MiB; the budget is 8 MiB.*{AGAIN}"):
            large(torch.ones(2000))
        assert not lives.names()
    saved = large.state_dict()["weight"]
    lives.next()
    assert torch.equal(large(torch.ones(2000)), wanted)
    assert addresses(large) == before
    evict(lives.client, "large")
    assert saved.sum(), "a copy of its own, which needs no lease"
    assert is_right(model)


def test_a_lost_attached_model_is_an_ordinary_one_once_its_client_is_closed(lives: Lives) -> None:
    large = nn.Linear(2000, 2000).requires_grad_(requires_grad=False)
    lives.client.attach({"large": large})
    before, wanted = addresses(large), large(torch.ones(2000))
    lives.next(budget="2MiB")
    with pytest.raises(TooLarge):
        large(torch.ones(2000))
    lives.client.close()
    assert torch.equal(large(torch.ones(2000)), wanted)
    assert addresses(large) == before
    assert lives.client.session.components == {}


def test_a_lost_client_that_is_closed_without_its_weights_leaves_no_host_copy(
    lives: Lives,
) -> None:
    before = host_copies()
    large = nn.Linear(2000, 2000).requires_grad_(requires_grad=False)
    lives.client.attach({"large": large})
    lives.next(budget="2MiB")
    with pytest.raises(TooLarge):
        large(torch.ones(2000))
    assert host_copies() - before
    lives.client.close(keep=False)
    assert not host_copies() - before


def test_all_that_a_client_has_joins_with_the_first_call_of_one_model(lives: Lives) -> None:
    one, two = seeded(Model), seeded(Decoder)
    lives.client.attach(one, prefix="one")
    lives.client.attach({"two": two})
    extra = torch.arange(1024.0)
    component = lives.client.register("extra", {"x": extra}, policy="sequential")
    scratch = lives.client.register_scratch("kv", "2MiB", mutable=True)
    with lives.client.acquire("kv"):
        scratch.tensor.fill_(7)
    view = lives.client.register("buffer", {"b": b"bytes"}).view("b")
    names, where = lives.names(), extra.data_ptr()
    lives.next()
    assert is_right(one)
    assert lives.names() == names
    assert extra.data_ptr() == where == component.address
    assert {c.name: c.policy for c in lives.daemon.status().components}["extra"] == "sequential"
    with lives.client.acquire("extra", "kv", "buffer"):
        assert torch.equal(extra, torch.arange(1024.0))
        assert bool((scratch.tensor == 7).all())
        assert bytes(view) == b"bytes"
    assert torch.equal(two(X), seeded(Decoder)(X))
    lives.client.unregister("extra")
    assert torch.equal(extra, torch.arange(1024.0))


def test_what_is_no_attached_model_still_says_that_the_daemon_is_gone(lives: Lives) -> None:
    lives.client.register("a", {"x": torch.ones(4)})
    lives.next()
    with pytest.raises(DaemonGone, match="the daemon is gone"):
        lives.client.acquire("a")
    with pytest.raises(DaemonGone):
        lives.client.update("a", {"x": torch.zeros(4)})


def test_a_size_that_was_set_meanwhile_is_that_of_the_next_daemon_too(lives: Lives) -> None:
    model = seeded(Model)
    lives.client.attach(model, ["transformer"], blocks=["0", "1", "2"], resident=0)
    lives.client.resize("transformer", "16MiB")
    lives.next()
    model.transformer(X)
    assert {c.state for c in lives.daemon.status().components} == {"idle"}


def test_what_was_written_to_a_mutable_component_is_there(lives: Lives) -> None:
    model = seeded(Decoder)
    lives.client.register("vae", model, mutable=True)
    lives.client.attach({"vae": model})
    model.register_forward_hook(lambda *_: model.out.bias.add_(1))
    wanted = seeded(Decoder).out.bias
    for calls in range(1, 4):
        model(X)
        lives.next()
        model(X)
        with lives.client.acquire("vae"):
            assert torch.allclose(model.out.bias, wanted + 2 * calls)


def test_new_weights_join_the_next_daemon_or_change_nothing(lives: Lives) -> None:
    model, twin = seeded(Decoder), seeded(Decoder)
    attachment = lives.client.attach({"vae": model})
    twice = {name: value * 2 for name, value in twin.state_dict().items()}
    lives.kill()
    with pytest.raises(NotRunning, match=AGAIN):
        model.load_state_dict(twice)
    lives.start()
    assert torch.equal(model(X), twin(X))
    lives.next()
    model.load_state_dict(twice)
    twin.load_state_dict(twice)
    assert torch.equal(model(X), twin(X))
    with attachment.edit("vae"):
        model.out.weight.mul_(2)
        twin.out.weight.mul_(2)
        lives.next()
    assert torch.equal(model(X), twin(X))


def test_a_lease_of_this_thread_ends_before_it_joins(lives: Lives) -> None:
    model = seeded(Model)
    attachment = lives.client.attach(model)
    with attachment.use("vae"):
        lives.next()
        with pytest.raises(DaemonGone, match=NEXT):
            model(TOKENS)
        weight = model.vae.out.weight
        assert torch.equal(weight, seeded(Model).vae.out.weight), "it is still held"
    with attachment.use("vae"):
        assert is_right(model)
    lives.next()
    with attachment.use("vae"):
        assert torch.equal(model.vae.out.weight, seeded(Model).vae.out.weight)


def test_calls_of_other_threads_end_before_one_joins_and_each_has_its_result(
    lives: Lives,
) -> None:
    model, wanted = computed(X, Alive)
    lives.client.attach({"model": model}, ".")
    inside, go, results = threading.Event(), threading.Event(), []

    def between() -> None:
        if threading.current_thread() is first:
            inside.set()
            assert go.wait(PATIENCE_S)

    def call() -> None:
        results.append(torch.equal(model(X), wanted))

    model.between = between
    first = threading.Thread(target=call)
    others = [threading.Thread(target=call) for _ in range(4)]
    first.start()
    assert inside.wait(PATIENCE_S)
    lives.next()
    for other in others:
        other.start()
    assert not results, "they would unmap what the first one computes on"
    assert not lives.names()
    go.set()
    for thread in [first, *others]:
        thread.join()
    assert results == [True] * 5
    opened = lives.daemon.watch.seen("SessionOpened")
    assert [one.label for one in opened].count("client") == 1


def test_a_call_that_waits_for_another_one_is_not_waited_for(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapd_client.rejoining.PATIENCE_S", 0.05)
    model, inner = seeded(Alive), seeded(Decoder)
    lives.client.attach({"model": model, "inner": inner})
    errors: list[Exception] = []

    def call() -> None:
        try:
            inner(X)
        except DaemonGone as exc:
            errors.append(exc)

    def between() -> None:
        lives.next()
        started(call).join()

    model.between = between
    model(X)
    assert NEXT in str(errors[0])
    model.between = lambda: None
    assert torch.equal(model(X), seeded(Alive)(X))


def test_an_interrupt_at_any_place_leaves_the_next_call_right(lives: Lives) -> None:
    model, wanted = computed(X, Decoder)
    lives.client.attach({"model": model})
    lives.next()
    with interrupts():
        found = places(partial(model, X), 10**6)
        ways = {p[:2]: p for p in found if p.code.co_name in TO_THE_NEXT}
        assert {code.co_name for code, _ in ways} == TO_THE_NEXT
        for place in ways.values():
            lives.next()
            interrupt(partial(model, X), place)
            assert torch.equal(model(X), wanted)
            assert here().entries == []
            assert lives.names() == {"model"}


@pytest.mark.parametrize("then", ["called", "closed"])
def test_an_interrupt_while_a_client_joins_ends_the_wait_and_the_next_call_awaits_the_rest(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    model, wanted = computed(X, Decoder)
    lives.client.attach({"model": model})
    go, fill = threading.Event(), Registry.fill

    def interrupt_and_wait(registry: Registry, part: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert go.wait(PATIENCE_S)
        fill(registry, part)

    monkeypatch.setattr(Registry, "fill", interrupt_and_wait)
    lives.next()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    monkeypatch.undo()
    threading.Timer(0.05, go.set).start()
    if then == "closed":
        lives.client.close()
        assert torch.equal(model(X), wanted), "its memory is its own"
        return
    assert torch.equal(model(X), wanted)
    assert len([one for one in lives.daemon.status().sessions if one.label == "client"]) == 1


def test_one_that_dies_while_a_client_joins_is_replaced_too(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Model)
    lives.client.attach(model)
    before = addresses(model)
    fill = Registry.fill
    once = [True]

    def fill_and_die(registry: Registry, part: Any) -> None:
        fill(registry, part)
        if once and once.pop():
            lives.daemon.kill()

    monkeypatch.setattr(Registry, "fill", fill_and_die)
    lives.next()
    with pytest.raises(DaemonGone, match=AGAIN):
        model(TOKENS)
    lives.start()
    assert is_right(model)
    assert addresses(model) == before


def test_detaching_after_a_loss_joins_first_or_says_what_to_do(lives: Lives) -> None:
    model = seeded(Model)
    attachment: Attachment = lives.client.attach(model)
    before = addresses(model)
    lives.kill()
    with pytest.raises(NotRunning, match=r"client.close\(\) makes all tensors private memory"):
        attachment.detach()
    lives.start()
    attachment.detach()
    assert not lives.names()
    assert is_right(model)
    assert addresses(model) == before


def test_a_model_that_is_garbage_does_not_join(lives: Lives) -> None:
    one, two = seeded(Model), nn.Linear(2000, 2000).requires_grad_(requires_grad=False)
    wanted = two(torch.ones(2000))
    lives.client.attach(one)
    lives.client.attach({"two": two})
    freed = [(p.data_ptr(), p.nbytes) for p in one.parameters()]
    lives.kill()
    del one
    gc.collect()
    lives.start(budget="8MiB")
    with pytest.raises(TooLarge):
        two(torch.ones(2000))
    assert not any(ranges.find(*span) for span in freed), "other tensors may lie there by now"
    lives.daemon.kill()
    lives.start()
    assert torch.equal(two(torch.ones(2000)), wanted)
    assert lives.names() == {"two"}
    assert not any(ranges.find(*span) for span in freed)


def test_a_client_that_is_closed_or_dropped_after_it_joined_leaves_nothing(lives: Lives) -> None:
    for way in ("closed", "dropped"):
        model, client = seeded(Decoder), lives.connect()
        client.attach({"model": model})
        lives.kill(client)
        lives.start()
        assert torch.equal(model(X), seeded(Decoder)(X))
        session = client.session.welcome.session
        if way == "closed":
            client.close()
            assert torch.equal(model(X), seeded(Decoder)(X))
        del model, client
        gc.collect()
        lives.daemon.watch.until_gone(session)


def test_a_forked_child_joins_no_daemon(lives: Lives) -> None:
    model = seeded(Decoder)
    lives.client.attach({"model": model})
    lives.next()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for call in (lambda: model(X), lives.client.status):
                with pytest.raises(ClientClosed):
                    call()
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        assert told.read() == b"refused"
    os.waitpid(pid, 0)
    assert torch.equal(model(X), seeded(Decoder)(X))


async def test_a_model_of_an_async_client_joins_and_so_does_its_client(lives: Lives) -> None:
    model = seeded(Model)
    client = await swapd_client.connect_async(lives.daemon.folder)
    await client.attach(model)
    lives.kill(client._client)
    lives.start()
    assert await asyncio.to_thread(is_right, model)
    assert (await client.status()).sessions
    async with client.acquire("vae"):
        assert torch.equal(model.vae.out.weight, seeded(Model).vae.out.weight)
    await client.close()
    assert is_right(model)


def test_a_registered_module_that_leaves_its_component_is_warned_of_after_it_too(
    lives: Lives,
) -> None:
    attached, registered = seeded(Decoder), nn.Linear(WIDTH, WIDTH)
    lives.client.register("registered", registered)
    with lives.client.attach({"attached": attached}), torch.inference_mode():
        lives.next()
        attached(X)
        warned = pytest.warns(UserWarning, match="has left component 'registered'")
        with lives.client.acquire("registered"), warned:
            registered.half()
