"""The workers' public methods, and the state in which swapd's call each; in a process with vLLM."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm.v1.outputs import AsyncModelRunnerOutput

from swapd_client.vllm import scheduler
from swapd_client.vllm.refusals import Unsupported
from tests.vllm.method_table import DIFFUSION, WORKER, WorkerMethods

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
        self.memory = self

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

    request = reading_all = using

    def changing(self) -> Any:
        return self._as("changing")

    def note(self, came: object, went: object) -> None: ...

    def arrive(self) -> None: ...

    def sleep(self, what: object = ()) -> None: ...

    def wake_up(self, what: object = None) -> None: ...


def does(kind: type, calls: WorkerMethods, swapd: Stage, **state: object) -> dict[str, str]:
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
    if name.endswith(":SwapdWorkerMixin"):
        parallel = SimpleNamespace(
            data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        )
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


def misfits(name: str, *bases: str) -> list[str]:
    """The overrides of swapd's class that cannot be called as vLLM's own method can, and the
    abstract methods that it lacks. `bases`: classes of vLLM below it.
    """
    kind: Any = type("Whole", tuple(map(resolve_name, (name, *bases))), {})
    mro = kind.__mro__[1:]
    above = [one for one in mro if not one.__module__.startswith("swapd_client")]
    found = [f"{name} lacks {method}" for method in getattr(kind, "__abstractmethods__", ())]
    for ours in (one for one in mro if one not in above):
        for method, mine in vars(ours).items():
            theirs = next((vars(one)[method] for one in above if method in vars(one)), None)
            if inspect.isfunction(mine) and inspect.isfunction(theirs) and not fits(mine, theirs):
                found.append(f"{ours.__name__}.{method} is called as {inspect.signature(theirs)}")
    return found


def fits(mine: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether it accepts each argument of the other, by place and by name."""
    of_theirs = inspect.signature(theirs).parameters.values()
    given = [p for p in of_theirs if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    placed = [p.name for p in given if p.kind is not p.KEYWORD_ONLY]
    named = dict.fromkeys(p.name for p in given if p.kind is p.KEYWORD_ONLY)
    try:
        inspect.signature(mine).bind(*placed, **named)
        inspect.signature(mine).bind(placed[0], **dict.fromkeys(placed[1:]), **named)
    except TypeError:
        return False
    return True


class ToCome(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A step's output that arrives later, in a version of vLLM that asks one thing more of it."""

    @abstractmethod
    def get_more(self) -> str: ...


def passed_on() -> dict[str, str]:
    """The answer of each of its methods, through swapd."""
    names: Any = ToCome.__abstractmethods__
    answers = {name: lambda self, name=name: name for name in names}
    later = scheduler.with_verdict(type("Later", (ToCome,), answers)(), scheduler.all_counts)
    return {name: getattr(later, name)() for name in names}


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
