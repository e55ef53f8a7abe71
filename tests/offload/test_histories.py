"""Random histories of calls: with hooks removed at times, and without; and the cost of a hit."""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from swapd_client import Client, DaemonGone, SessionFenced, WouldDeadlock
from swapd_client.offload import attach
from swapd_client.offload.hooks import Hook
from swapd_client.offload.scope import here, kept_between_calls
from swapd_client.offload.update_barrier import quiet
from tests.offload.modules import WIDTH, seeded

HISTORIES = 30
CALLS = 20
DEPTH = 2


class Never:
    """Replaces `BlockHooks`: its hooks are always there."""

    def __init__(self, *, compiled: bool = True) -> None:
        pass

    def add(self, hook: Hook) -> None:
        pass

    def begin(self, *, whole: bool) -> None:
        pass

    def end(self, *, whole: bool) -> None:
        pass


# --- histories ---------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a module, its inner calls, and its end."""

    module: str
    mode: str
    around: str
    inside: "tuple[Call, ...]"
    ends: str
    #: The error of an acquire of it.
    refused: type[Exception] | None = None


MODULES = (
    *["whole"] * 3,
    "whole.norm",
    "whole.layers.0",
    "streamed",
    "streamed.layers.0",
    "streamed.norm",
    "both",
)
MODES = (*["inference"] * 4, "no grad", "no grad", "grad", "grad of x")
AROUND = (*[""] * 6, "thread", "use", "turn", "turn, wanted", "change", "foreign")
ENDS = (
    "tensor",
    "tensor",
    "weights",
    "weights",
    "tuple",
    "mapping",
    "nothing",
    "steps",
    "raises",
    "stopped",
    "stopped",
)
BETWEEN = ("", "", "", "update", "again")
REFUSED = (*[None] * 30, DaemonGone, SessionFenced, WouldDeadlock)


def some_call(rng: random.Random, around: Sequence[str], depth: int) -> Call:
    inside = rng.choice((0, 1, 2)) if depth else 0
    return Call(
        rng.choice(MODULES),
        rng.choice(MODES),
        rng.choice(around),
        tuple(some_call(rng, around, depth - 1) for _ in range(inside)),
        rng.choice(ENDS),
        rng.choice(REFUSED),
    )


class Part(nn.Module):
    """Its forward follows a history, and its inner calls use its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, do: Callable[[nn.Module, torch.Tensor], Any]) -> Any:
        for layer in self.layers:
            x = layer(x)
        return do(self, self.norm(x))


class Both(nn.Module):
    """Uses two components, and is in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.streamed = Part(), Part()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, do: Callable[[nn.Module, torch.Tensor], Any]) -> Any:
        return do(self, self.own(x))


class World:
    """An attached model, and a record of its calls."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self._client = client
        self._acquire = client.acquire
        self._refusal: type[Exception] | None = None
        self._model = seeded(Both)
        self._model.streamed.norm.requires_grad_(True)
        self._attach()
        monkeypatch.setattr(client, "acquire", self._recorded)

    def _attach(self) -> None:
        parts = ["whole", "streamed"]
        blocks = {"streamed": [f"layers.{i}" for i in range(3)]}
        self._attachment = self._client.attach(self._model, parts, blocks=blocks, trainable=False)
        self._acquire(*parts).release()  # so that the same components are on the device each time

    def _recorded(self, *names: str, **options: Any) -> Any:
        if (refusal := self._refusal) is not None:
            self._refusal = None
            self.seen.append(("refused", names))
            raise refusal("as told")
        lease = self._acquire(*names, **options)
        release = lease.release

        def released() -> None:
            self.seen.append(("released", names))
            release()

        self.seen.append(("acquired", names, options))
        lease.release = released  # type: ignore[method-assign]
        return lease

    def close(self) -> None:
        self._attachment.detach()

    # --- events between calls

    def between(self, what: str, rng: random.Random) -> None:
        if what == "update" and not here().entries:
            name = rng.choice(["norm.weight", "norm.bias"])
            self._client.update("whole", {name: torch.full((WIDTH,), rng.random())})
        elif what == "again":
            self._attachment.detach()
            self._attach()

    # --- calls

    def run(self, call: Call) -> None:
        """Make a call, and record its actions, its result or its error."""
        self.seen.append(("called", *call[:3], call.ends))
        if call.around == "thread":
            thread = threading.Thread(target=self._run, args=(call,))
            thread.start()
            thread.join()
        else:
            self._run(call)

    def _run(self, call: Call) -> None:
        module = self._model.get_submodule("" if call.module == "both" else call.module)
        self._refusal = call.refused
        try:
            with self._around(call.around, module), _mode(call.mode):
                self._note(self._call(module, call))
        except BaseException as exc:  # noqa: BLE001 - noted
            self.seen.append(("raised", type(exc), str(exc)))
        self._refusal = None
        scope = here()
        entries = [(repr(entry.held), entry.is_call) for entry in scope.entries]
        counts = [(repr(held), count.n) for held, count in scope.counts.items()]
        self.seen.append(("left", entries, sorted(counts), scope.begins))

    def _call(self, module: nn.Module, call: Call) -> Any:
        x = torch.ones(2, WIDTH, requires_grad=call.mode == "grad of x")
        if isinstance(module, (Part, Both)):
            return module(x, lambda part, x: self._inside(part, x, call))
        return module(x)

    def _inside(self, part: Any, x: torch.Tensor, call: Call) -> Any:
        for one in call.inside:
            self.run(one)
        weight = part.own.weight if isinstance(part, Both) else part.norm.weight
        match call.ends:
            case "weights":
                return weight[:8]
            case "tuple":
                return [x, (weight.view(-1)[:4], 3)]
            case "mapping":
                return {"x": x, "none": None}
            case "nothing":
                return None
            case "steps":
                return _steps(weight.view(-1), x)
            case "raises":
                raise ValueError("as told")
            case "stopped":
                raise KeyboardInterrupt("as told")
        return x

    def _around(self, what: str, module: nn.Module) -> AbstractContextManager[Any]:
        client = self._client
        match what.partition(",")[0]:
            case "use":
                return self._attachment.use(module)
            case "turn":
                if what != "turn":
                    client.session.told.wanted.add("whole")
                stack = ExitStack()
                stack.callback(client.session.told.wanted.discard, "whole")
                stack.enter_context(kept_between_calls(client, 0.0))
                return stack
            case "change":
                return quiet({client: ["elsewhere"]})
            case "foreign":  # the first to be called, so that ours is not, and then its other hook
                stack = ExitStack()
                stack.enter_context(module.register_forward_pre_hook(_foreign, prepend=True))
                return stack
        return nullcontext()

    def _note(self, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            parts = self._client.session.components.values()
            start = output.data_ptr()
            is_lent = any(part.address <= start < part.address + part.nbytes for part in parts)
            self.seen.append(("tensor", is_lent, output.shape, output.tolist()))
        elif isinstance(output, (list, tuple)):
            self.seen.append(type(output))
            for one in output:
                self._note(one)
        elif isinstance(output, dict):
            self._note(list(output.items()))
        elif isinstance(output, (GeneratorType, Iterator)):
            self.seen.append("steps")
            for one in output:
                self._note(one)
        else:
            self.seen.append(output)


def _mode(mode: str) -> AbstractContextManager[Any]:
    if mode.startswith("grad"):
        return torch.enable_grad()
    return torch.inference_mode() if mode == "inference" else torch.no_grad()


def _steps(weight: torch.Tensor, x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield weight[:4]
    yield x[0]


def _foreign(module: nn.Module, args: Any) -> None:
    raise RuntimeError("foreign")


def history(client: Client, seed: int, around: Sequence[str]) -> list[Any]:
    """The record of the calls that this seed makes."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        world = World(client, patched)
        for _ in range(CALLS):
            world.run(some_call(rng, around, DEPTH))
            world.between(rng.choice(BETWEEN), rng)
        world.close()
    return world.seen


def compare(seen: list[Any], plain: list[Any]) -> None:
    for ours, theirs in zip(seen, plain, strict=False):
        assert ours == theirs
    assert len(seen) == len(plain)
    assert any(isinstance(one, tuple) and one[0] == "acquired" for one in seen)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_hooks_that_are_aside_would_have_done_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Holds within one thread."""
    around = [what for what in AROUND if what != "thread"]
    seen = history(client, seed, around)
    monkeypatch.setattr(attach, "BlockHooks", Never)
    compare(seen, history(client, seed, around))


# --- the number of functions -------------------------------------------------------------


def functions(call: Callable[[], object]) -> list[str]:
    """The functions called around a module's forward, in order; without those for compiled code."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        where = frame.f_code.co_filename
        if event == "call" and "swapd_client/offload" in where and "dynamo" not in where:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_a_call_that_finds_all_of_it_there_calls_few_functions(client: Client) -> None:
    """On a machine under any load: each function is slow with cold caches."""
    part = seeded(Part)
    x = torch.ones(1, WIDTH)

    def call() -> None:
        part(x, lambda part, x: x)

    with torch.inference_mode():
        with client.attach({"whole": part}):
            call()
            assert functions(call).count("LeaseGate.run") == len(part.layers) + 2
            assert len(functions(call)) < 30
        with client.attach({"streamed": part}, blocks=["layers.0", "layers.1", "layers.2"]):
            client.acquire("streamed").release()
            call()
            assert functions(call).count("LeaseGate.run") == 1
