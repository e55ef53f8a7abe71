"""A component is held from the beginning of a call to its end, and nothing stays held."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swapd_client import Client, InvalidArgument, NotWhileAttached, SwapdError
from swapd_client.offload.scope import here
from tests.guarantees.harness import Daemon
from tests.offload.modules import (
    TOKENS,
    WIDTH,
    Decoder,
    Encoder,
    Model,
    assert_comes_back,
    await_none_leased,
    computed,
    evict,
    leases,
    seeded,
)
from tests.threads import run_together, started

X = torch.ones(2, WIDTH)


def held_now(client: Client) -> int:
    return sum(leases(client).values())


# --- exceptions (36) ---------------------------------------------------------------------


class Raises(nn.Module):
    """Raises a given error, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_gives_the_component_back(client: Client, error: type[BaseException]) -> None:
    model = seeded(Lists)
    with client.attach({"dit": model}, "."), torch.inference_mode():
        model.layers[1].error = error()
        for call in (model.layers[1], model):
            with pytest.raises(error):
                call(X)
            assert held_now(client) == 0
        model.layers[1].error = None
        model(X)
        assert held_now(client) == 0
        assert not here().counts


def test_an_interrupt_inside_an_outer_call_leaves_the_outer_one_held(client: Client) -> None:
    """The outer forward goes on, so its lease must stay."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = seeded(Raises)
            self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(KeyboardInterrupt):
                self.inner(x)
            self.inner.error = None
            x = self.inner(x)
            assert leases(client) == {"outer": 1, "outer.inner": 0}
            return self.own(x)  # type: ignore[no-any-return]

    model = Outer()
    with client.attach({"outer": model}, ["outer", "outer.inner"]):
        model.inner.error = KeyboardInterrupt()
        model(X)
        assert held_now(client) == 0


def test_what_a_thread_left_behind_goes_with_it(client: Client, daemon: Daemon) -> None:
    left: list[int] = []
    with client.attach({"dit": seeded(Raises)}) as attachment:

        def run() -> None:
            attachment.use("dit").__enter__()
            left.extend(record.id for record in client.session.leases)

        started(run).join()
        session = client.session.welcome.session
        # the thread's locals go a moment after the join
        daemon.await_record("Release", session=session, lease=left[0])
        assert held_now(client) == 0


def test_a_foreign_hook_that_raises_before_ours_ends_nobody_elses_entry(client: Client) -> None:
    """The same module again, inside its own call: the outer call must keep its lease."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            if depth:
                with pytest.raises(RuntimeError, match="foreign"):
                    self(x, depth - 1)
                assert held_now(client) == 1
            return self.own(x)  # type: ignore[no-any-return]

    model = seeded(Again)
    calls = iter([False, True])

    def foreign(module: nn.Module, args: Any) -> None:
        if next(calls):
            raise RuntimeError("foreign")

    with client.attach({"dit": model}):
        model.register_forward_pre_hook(foreign, prepend=True)
        model(X)
        assert held_now(client) == 0


def test_an_error_of_a_foreign_hook_is_the_one_that_is_raised(client: Client) -> None:
    model = seeded(Decoder)

    def foreign(module: nn.Module, args: Any, output: Any) -> None:
        raise RuntimeError("foreign")

    with client.attach({"vae": model}):
        model.register_forward_hook(foreign)
        with pytest.raises(RuntimeError, match="foreign"):
            model(X)
        assert held_now(client) == 0


# --- code that no hook sees (39) ---------------------------------------------------------


def test_methods_of_the_components_own_class_hold_it(client: Client) -> None:
    model = seeded(Decoder)
    expected = model.decode(X)
    with client.attach({"vae": model}):
        for _ in range(2):
            assert_comes_back(client, model.decode, X, expected, "vae")
        assert held_now(client) == 0
        assert model.decode.__doc__ == "The documentation of decode."
        evict(client, "vae")
        model.enable_tiling()  # it only switches an option
        assert client.status().components[0].state == "absent"
    assert "decode" not in model.__dict__


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


class Odd(nn.Module):
    """Callables of its class that are no methods: of C, partial, a module, static."""

    act: Any = torch.relu
    clamped = partial(torch.clamp, max=4.0)
    scaled = nn.Hardtanh(-2.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def named(cls, x: torch.Tensor) -> tuple[str, torch.Tensor]:
        return cls.__name__, x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.doubled(self.scaled(self.clamped(self.act(self.inner(x)))))
        return self.named(x)[1]


def test_callables_of_a_class_that_are_no_methods_stay_what_they_are(client: Client) -> None:
    model, expected = computed(X, Odd)
    with client.attach({"dit": model}):
        assert_comes_back(client, model, X, expected, "dit")
        assert model.scaled is Odd.scaled
        assert model.clamped is Odd.clamped
    named = ["act", "clamped", "scaled", "doubled", "named"]
    with client.attach({"dit": model}, wrap_methods=named):
        assert_comes_back(client, model, X, expected, "dit")
    assert not vars(model).keys() & set(named)


def test_a_parents_direct_reads_are_for_use(client: Client) -> None:
    model = seeded(Encoder)
    want = nn.functional.linear(X, model.embed.weight)
    with client.attach({"text": model}) as attachment:
        evict(client, "text")
        with attachment.use("text"):
            assert torch.equal(nn.functional.linear(X, model.embed.weight), want)
            with attachment.use(model), attachment.use(model.norm):
                assert leases(client) == {"text": 1}
            model(TOKENS)
            assert leases(client) == {"text": 1}
        assert held_now(client) == 0
        evict(client, "text")
        with attachment.use(model):
            assert torch.equal(model.forward(TOKENS), model(TOKENS))
        with pytest.raises(ValueError, match=r"'dit'.* text"):
            attachment.use("dit")
        with pytest.raises(ValueError, match="this Linear"):
            attachment.use(nn.Linear(1, 1))
        names: Any = ["text"]
        for block in (attachment.use, attachment.edit):
            with pytest.raises(InvalidArgument, match=r"\['text'\] is neither the name"):
                block(names)


def test_use_takes_several_at_once_or_none(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model, prefix="flux") as attachment:
        with attachment.use("vae", "flux.transformer"):
            assert sum(leases(client).values()) == 2
            model.vae(X)
            with pytest.raises(RuntimeError, match="inside"), attachment.use("vae"):
                raise RuntimeError("inside")
            assert sum(leases(client).values()) == 2
        with attachment.use("flux"):
            assert len(leases(client)) == len(attachment.components)
        assert held_now(client) == 0
    with client.attach(model, cpu_offload_enabled=True) as attachment:
        with pytest.raises(SwapdError), attachment.use("vae", "transformer"):
            pass
        assert held_now(client) == 0


class Lists(nn.Module):
    """Lists, a dict, and a Sequential of Sequentials, of which callers outside call a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Raises()])
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH)]) for _ in range(2))
        self.by_name = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})
        self.inner = Encoder()
        self.encoders = nn.ModuleList([Encoder()])
        self.features = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(self.layers[1](self.layers[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.layers[1](m.layers[0](X)),
        lambda m: m.pairs[1][0](X),
        lambda m: m.by_name["a"](X),
        lambda m: m.inner.layers[1](X),
        lambda m: m.encoders[0].embed(TOKENS),  # an embedding may be deeper than a member
        lambda m: m.features[1](X),
        lambda m: m.features[:2](X),
    ],
)
@pytest.mark.parametrize("blocks", [None, ["layers"]])
def test_a_member_of_a_list_may_be_called_by_itself(
    client: Client, blocks: list[str] | None, call: Callable[[Lists], torch.Tensor]
) -> None:
    model = seeded(Lists)
    expected, whole = call(model), model(X)
    with client.attach({"dit": model}, ".", blocks=blocks):
        for _ in range(2):
            assert_comes_back(client, call, model, expected, *leases(client))
            assert held_now(client) == 0
            with torch.inference_mode():
                assert torch.equal(model(X), whole)
                assert torch.equal(call(model), expected)
            assert held_now(client) == 0
        assert not here().counts


# --- the order of hooks (40) -------------------------------------------------------------


def test_all_hooks_of_a_module_run_under_its_lease(client: Client) -> None:
    model = seeded(Decoder)
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *_: seen.append(f"{what}: {held_now(client)}")

    model.register_forward_pre_hook(note("earlier pre"))
    model.register_forward_hook(note("earlier post"))
    with client.attach({"vae": model}):
        model.register_forward_pre_hook(note("first"), prepend=True)
        model.register_forward_hook(note("last"))
        model(X)
    assert seen == ["first: 1", "earlier pre: 1", "earlier post: 1", "last: 1"]


# --- nesting (42) ------------------------------------------------------------------------


class Recursive(nn.Module):
    """Calls itself, and a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.block(x)
        return self(x, depth - 1) if depth else x


def test_a_call_that_begins_while_another_thread_attaches_its_model_again_runs(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = computed(X, Decoder)
    attachment = client.attach({"vae": model})
    take = client.leasing.take

    def take_late(*args: Any) -> Any:
        monkeypatch.undo()
        attachment.detach()
        try:
            return take(*args)
        finally:
            client.attach({"vae": model})

    monkeypatch.setattr(client.leasing, "take", take_late)
    assert torch.equal(model(X), expected)


def test_a_component_that_calls_itself_is_held_until_the_outermost_ends(client: Client) -> None:
    model, expected = computed(X, Recursive)
    with client.attach({"dit": model}) as attachment:
        assert_comes_back(client, model, X, expected, "dit")
        assert held_now(client) == 0
        assert not here().counts
        with attachment.use("dit"):
            model(X)
            assert held_now(client) == 1


def test_an_outer_component_stays_while_an_inner_one_comes_in(client: Client) -> None:
    model, expected = computed(TOKENS, Encoder, 4)
    names = ["model", "model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"]
    with client.attach({"model": model}, names):
        for _ in range(3):
            assert_comes_back(client, model, TOKENS, expected, *names)
        assert held_now(client) == 0


# --- threads (43) ------------------------------------------------------------------------


def test_four_threads_on_components_that_do_not_fit_together(client: Client) -> None:
    models = {
        f"m{i}": seeded(nn.Sequential, *[nn.Linear(1024, 1024) for _ in range(2)]) for i in "abcd"
    }
    x = torch.ones(1, 1024)
    expected = {name: model(x) for name, model in models.items()}
    wrong: list[Any] = []

    def run(name: str) -> None:
        try:
            for i in range(12):
                other = list(models)[(list(models).index(name) + i) % 4]
                with torch.inference_mode():
                    if not torch.equal(models[other](x), expected[other]):
                        wrong.append(other)
        except BaseException as exc:  # noqa: BLE001 - told below
            wrong.append(exc)

    with client.attach(models, "."):
        threads = [threading.Thread(target=run, args=(name,)) for name in models]
        run_together(*threads)
        assert wrong == []
        await_none_leased(client)
        assert client.status().evictions > 0


# --- loading in another thread (44) ------------------------------------------------------


def test_models_are_attached_one_at_a_time(client: Client) -> None:
    """Loaders that patch registration see each attach whole or not at all."""
    models = [seeded(Model) for _ in range(4)]
    attachments: list[Any] = []
    inside = [0, 0]
    register = client.register

    def counted(*args: Any, **options: Any) -> Any:
        inside[0] += 1
        inside[1] = max(inside)
        try:
            return register(*args, **options)
        finally:
            inside[0] -= 1

    client.register = counted  # type: ignore[method-assign]
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        attachments.append(client.attach(models[number], prefix=f"m{number}"))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    run_together(*threads)
    assert inside[1] == 1
    assert len(client.status().components) == 12
    for model in models:
        assert torch.equal(model(TOKENS), models[0](TOKENS))


# --- gradients (32, 33) ------------------------------------------------------------------


def test_grad_mode_is_refused_unless_it_is_held_over_backward(client: Client) -> None:
    model = seeded(Decoder).requires_grad_(True)
    with client.attach({"vae": model}) as attachment:
        with pytest.raises(NotWhileAttached, match=r"no_grad\(\).*attachment.use\('vae'\)"):
            model(X)
        with torch.no_grad():
            model(X)
        model.requires_grad_(False)
        with pytest.raises(NotWhileAttached, match="its output requires grad"):
            model(X.clone().requires_grad_())
        model(X)
        assert held_now(client) == 0
        model.requires_grad_(True)
        with attachment.use("vae"):
            model(X).sum().backward()
            errors: list[BaseException] = []

            def again() -> None:  # as backward does, in a thread of torch's, on a GPU
                try:
                    model(X).sum().backward()
                except BaseException as exc:  # noqa: BLE001 - told below
                    errors.append(exc)

            started(again).join()
            assert not errors
        with pytest.raises(NotWhileAttached):
            model(X)
        assert model.conv.weight.grad is not None


class Generates(nn.Module):
    """Methods that compute under no_grad, in grad mode, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)  # type: ignore[no-any-return]

    def status(self) -> str:
        return "trained"

    def by_a_forward(self, x: torch.Tensor) -> None:
        self.kept = self.out(x)

    def by_a_function(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(x=nn.functional.linear(x, self.out.weight))

    def in_steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield nn.functional.linear(x, self.out.weight)


@pytest.mark.parametrize("blocks", [(), ("out",)])
def test_a_method_may_be_called_in_grad_mode_and_what_computes_in_it_may_not(
    client: Client, blocks: Sequence[str]
) -> None:
    model = seeded(Generates).requires_grad_(True)
    expected = model.generate(X)
    with client.attach({"dit": model}, ".", blocks=blocks or None) as attachment:
        assert torch.equal(model.generate(X), expected)
        assert model.status() == "trained"
        for compute, why in {
            model: "parameters require",
            model.by_a_forward: "parameters require",
            model.by_a_function: "output requires",
            lambda x: next(model.in_steps(x)): "output requires",
        }.items():
            with pytest.raises(NotWhileAttached, match=f"'dit' was called in grad mode.*{why}"):
                compute(X)
            assert held_now(client) == 0
        with attachment.use("dit"):
            model.by_a_forward(X)
            model.kept.sum().backward()


def test_a_thread_that_generates_in_grad_mode_streams_to_its_end(client: Client) -> None:
    """The tutorial of a streamer: an error in the thread would leave the reader waiting."""
    model = seeded(Generates).requires_grad_(True)
    expected = model.generate(X)
    streamed: SimpleQueue[torch.Tensor | None] = SimpleQueue()

    def generate() -> None:
        try:
            for _ in range(3):
                streamed.put(model.generate(X))
        finally:
            streamed.put(None)

    with client.attach({"dit": model}, "."):
        thread = started(generate)
        pieces = list(iter(streamed.get, None))
        thread.join()
    assert len(pieces) == 3
    assert all(torch.equal(piece, expected) for piece in pieces)


def test_checkpointing_under_use_leaves_no_count_behind(client: Client) -> None:
    """Its recomputation in backward stops early: torch then runs no ordinary hook."""
    model = seeded(Decoder).requires_grad_(True)
    twin = seeded(Decoder).requires_grad_(True)
    twin(X).sum().backward()
    with client.attach({"vae": model}) as attachment:
        evict(client, "vae")
        with attachment.use("vae"):
            checkpoint(model, X, use_reentrant=False).sum().backward()
            assert leases(client) == {"vae": 1}
        assert held_now(client) == 0
        assert not here().counts
        assert torch.equal(model.conv.weight.grad, twin.conv.weight.grad)
