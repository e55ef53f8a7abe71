"""The workers' public methods, and the state in which swapd's call each; in a process with vLLM."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from swapd_client.vllm.calls import DIFFUSION, WORKER, Calls
from swapd_client.vllm.worker import Unsupported

#: vLLM calls these in this order, and nothing changes between two of them.
SERIES = (
    "execute_model",
    "sample_tokens",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


def public(kind: type) -> list[str]:
    """The public methods and properties of a class."""
    there = {name: inspect.getattr_static(kind, name) for name in dir(kind) if name[0] != "_"}
    return [
        name
        for name, thing in there.items()
        if isinstance(thing, property) or (callable(thing) and not isinstance(thing, type))
    ]


class Stage:
    """Plays `swapd_client.vllm.stage.Stage` and a pipeline's `Weights`, and reports their state."""

    options = SimpleNamespace(kv="private")
    components = SimpleNamespace(cache=None)
    begun = False
    name, nbytes = "thinker", 0

    def __init__(self) -> None:
        self.state = "without"

    def begin(self, *, encoders: bool = False) -> None:
        self.state = "leased"

    def end(self) -> None:
        self.state = "without"

    @contextmanager
    def _as(self, state: str) -> Iterator[None]:
        before, self.state = self.state, state
        yield
        self.state = before

    def using(self) -> Any:
        return self._as("leased")

    request = using

    def changing(self) -> Any:
        return self._as("changing")

    def note(self, came: object, went: object) -> None: ...

    def arrive(self) -> None: ...

    def sleep(self, what: object = ()) -> None: ...

    def wake_up(self, what: object = None) -> None: ...


def does(kind: type, calls: Calls, swapd: Stage, **state: object) -> dict[str, str]:
    """The state of the weights in each method of `calls`, when it is called on a `kind`."""
    seen: dict[str, str] = {}

    def method(name: str) -> Any:
        def run(self: object, *args: object, **kwargs: object) -> None:
            seen[name] = swapd.state

        return run

    names = calls.known - calls.life
    worker = type("Worker", (kind,), state)
    above = type("Above", (), {name: method(name) for name in names})
    probe: Any = type("Probe", (worker, above), {})()
    for name in (*names.difference(SERIES), *(name for name in SERIES if name in names)):
        call = getattr(probe, name)
        given = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        plain = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        seen[name] = "without"  # vLLM's own method overwrites this with the state it sees
        try:
            call(*(MagicMock(total_num_scheduled_tokens=1) for _ in plain))
        except Unsupported:
            seen[name] = "refused"
        if name not in SERIES:
            swapd.state = "without"
    return seen


def of_swapd(name: str) -> dict[str, str]:
    kind, stage = resolve_name(name), Stage()
    if name.endswith(":Leased"):
        parallel = SimpleNamespace(data_parallel_size=1)
        state = {
            "_swapd": stage,
            "_moving": MagicMock(),
            "model_runner": SimpleNamespace(),
            "_models": lambda self: {},
            "parallel_config": parallel,
            "vllm_config": SimpleNamespace(parallel_config=MagicMock()),
            "_weight_update_active": False,
        }
        return does(kind, WORKER, stage, **state)
    return does(kind, DIFFUSION, stage, _swapd=SimpleNamespace(weights=stage, stage=stage))


def said_of(*classes: str) -> dict[str, object]:
    """The report of each class, "module:Class", by class.

    A class of vLLM gives its public methods and properties. A class of swapd is mixed into empty
    workers, and gives for each method the state of the weights meanwhile (leased, changing,
    without), or refused.
    """
    return {
        name: of_swapd(name) if name.startswith("swapd") else public(resolve_name(name))
        for name in classes
    }
