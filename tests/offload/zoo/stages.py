"""The tries of each class, in a process of its own: a line of JSON for each finished stage.

An attached class runs after the eviction of all of it, and the test reads its outputs after another
eviction: a tensor that is still in swapd's memory is a fault then (isolation is strict).
"""

import faulthandler
import json
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from swapd_client import Client, NotWhileAttached, SwapdError, connect
from swapd_client.memory.movable import extent
from swapd_client.offload import ownership, registering, search
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.blocks import ModelBlock, blocks_of
from tests.offload.zoo.compare import difference, kept
from tests.offload.zoo.entries import Entry, all_entries

#: No class takes a tenth of it.
PATIENCE_S = 100
SEED = 2026
#: A component that is as large as the device.
_FILLER = "filler"


class _Wrong(Exception):
    """It ran, with a wrong result."""


class _Trial:
    """A model, built and run like any other of its class, and the number of its runs."""

    def __init__(self, one: Entry) -> None:
        self.entry = one
        _seed()
        self.subject = one.build()
        for module in self._roots().values():
            module.eval()
            _stir(module)
        self.runs = 0

    def run(self) -> Any:
        _seed()
        self.runs += 1
        with torch.enable_grad() if self.subject.training else nullcontext():
            return self.subject.run()

    def freeze(self) -> Callable[[], None]:
        """Freeze its parameters; the returned function undoes that."""
        parameters = [one for module in self._roots().values() for one in module.parameters()]
        thawed = [one for one in parameters if one.requires_grad]
        for one in parameters:
            one.requires_grad_(False)

        def thaw() -> None:
            for one in thawed:
                one.requires_grad_(True)

        return thaw

    def state(self) -> dict[str, Any]:
        return {name: module.state_dict() for name, module in self._roots().items()}

    def weights(self) -> Iterator[torch.Tensor]:
        yield from ownership.bytes_of(search.modules_of(self._roots()).values())

    def places(self) -> dict[tuple[int, int], int]:
        """The addresses of its parameters, and their bytes: tied ones share an address."""
        return {span: t.nbytes for t in self.weights() if (span := extent(t))[1]}

    @property
    def has_parts(self) -> bool:
        return any(True for root in self._roots().values() for _ in root.children())

    def _roots(self) -> dict[str, torch.nn.Module]:
        return search.roots_of(self.subject.model)


class _Twin:
    """A model that is never attached. A class may change at each call, so calls are counted."""

    def __init__(self, one: Entry) -> None:
        self._trial = _Trial(one)
        self._outputs: list[dict[str, torch.Tensor]] = []
        self._states: list[dict[str, torch.Tensor]] = []
        self.ties = len(self._trial.places())
        self.nbytes = sum(self._trial.places().values())

    def outputs(self, runs: int) -> dict[str, torch.Tensor]:
        """The output of the call of that number."""
        while len(self._outputs) < runs:
            self._outputs.append(kept(self._trial.run()))
            self._states.append(kept(self._trial.state()))
        return self._outputs[runs - 1]

    def state(self, runs: int) -> dict[str, torch.Tensor]:
        """Its state dicts after that call."""
        self.outputs(runs)
        return self._states[runs - 1]


def run_entry(name: str, folder: str, tries: Sequence[str]) -> None:
    """Print the result of each stage; the process may die in any. `tries`: of TRIES."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    warnings.simplefilter("ignore")
    one = next(one for one in all_entries() if one.name == name)
    with torch.no_grad():
        twin = _plain(one)
        if twin is not None:
            for one_try in tries:
                with connect(folder, label="zoo", faults="explain") as client:
                    client.register_scratch(_FILLER, client.status().budget_bytes)
                    TRIES[one_try](client, one, twin)
    faulthandler.cancel_dump_traceback_later()


def _say(stage: str, outcome: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"stage": stage, "outcome": outcome, **more}) + "\n")
    sys.stdout.flush()


@contextmanager
def _stage(stage: str) -> Iterator[dict[str, object]]:
    """Prints the result of a stage, with the items put into the yielded dict."""
    _say(stage, "began")
    more: dict[str, object] = {}
    try:
        yield more
    except SwapdError as error:
        _say(stage, f"refused: {error}")
    except Exception as error:
        logging.getLogger("zoo").exception("%s", stage)
        _say(stage, f"{type(error).__name__}: {error}")
    else:
        _say(stage, str(more.pop("outcome", "same")), **more)


# --- the model ---------------------------------------------------------------------------


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # for devices that do not exist, torch prints a stack


def _stir(module: torch.nn.Module) -> None:
    """In an untrained model, values that are all zeros or all ones would hide a loss."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and type(parameter.data) is torch.Tensor:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)


# --- stages ------------------------------------------------------------------------------


def _plain(one: Entry) -> _Twin | None:
    """Run a model that was never attached; a second one must give the same outputs."""
    with _stage("plain") as more:
        twin = _Twin(one)
        outputs = twin.outputs(1)
        if not outputs:
            raise _Wrong("no tensor came out")
        if any(bool(value.isnan().any()) for value in outputs.values()):
            raise _Wrong("what came out is no number")
        another = _Trial(one)
        _same(another, another.run(), twin)
        more["nbytes"] = twin.nbytes
        return twin
    return None


def _attached(client: Client, one: Entry, twin: _Twin) -> None:
    """As a user would: automatic components, one call after another, and detach."""
    trial = _Trial(one)
    attachment: Attachment | None = None
    with _stage("attached") as more, _warned() as said:
        attachment = _attach(client, trial)
        more |= _found(client, trial, attachment)
        more["warned"] = said
        with _held(trial, attachment):
            outputs = trial.run()
        _same(trial, outputs, twin)
    if attachment is None:
        return
    with _stage("evicted"):
        _evicted(client, trial, attachment, twin)
    with _stage("grad mode") as more:
        more["outcome"] = _in_grad_mode(client, trial, attachment, twin)
    with _stage("detached"):
        _detached(trial, attachment, twin)


def _whole(client: Client, one: Entry, twin: _Twin) -> None:
    """As one component."""
    _divided(client, one, twin, "whole", ".")


def _parts(client: Client, one: Entry, twin: _Twin) -> None:
    """Each child of the model is a component: one uses the outputs of another."""
    _divided(client, one, twin, "parts", "*")


def _divided(client: Client, one: Entry, twin: _Twin, stage: str, components: str) -> None:
    trial = _Trial(one)
    with _stage(stage) as more:
        if components == "*" and not trial.has_parts:
            more["outcome"] = "no parts"
            return
        attachment = _attach(client, trial, components=components)
        try:
            _evicted(client, trial, attachment, twin)
        finally:
            _detached(trial, attachment, twin)


def _streamed(client: Client, one: Entry, twin: _Twin) -> None:
    """Block by block, if it has blocks; none stays on the device."""
    trial = _Trial(one)
    with _stage("streamed") as more:
        with patch.object(registering, "blocks_of", _each_a_block):
            attachment = _attach(client, trial, resident=0, blocks=one.blocks or None)
        try:
            if attachment.streamed:
                more["blocks"] = sum(len(s.blocks) for s in attachment.streamed.values())
                _evicted(client, trial, attachment, twin)
            else:
                more["outcome"] = "no blocks"
        finally:
            _detached(trial, attachment, twin)


@torch.enable_grad()
def _attach(client: Client, trial: _Trial, **how: Any) -> Attachment:
    """In grad mode, as in scripts that do not set a mode."""
    return client.attach(trial.subject.model, **how)


def _each_a_block(
    component: torch.nn.Module, named: Sequence[str] | None = None, least: int = 0
) -> list[ModelBlock]:
    """None of these is as large as a chunk, and small neighbours would be one block."""
    return blocks_of(component, named)


def _evicted(client: Client, trial: _Trial, attachment: Attachment, twin: _Twin) -> None:
    """Run it after an eviction, and read the outputs after another one."""
    for _ in range(2):
        _evict(client)
        with _held(trial, attachment):
            outputs = trial.run()
        _evict(client)
        _same(trial, outputs, twin)
    _same_state(trial, twin)


def _in_grad_mode(client: Client, trial: _Trial, attachment: Attachment, twin: _Twin) -> str:
    """Run it as a script that sets no mode does. If swapd refuses that, freeze it first."""
    outcome, thaw = "same", _nothing
    _evict(client)
    with torch.enable_grad(), _held(trial, attachment):
        try:
            outputs = trial.run()
        except NotWhileAttached as error:
            if "its parameters require grad" not in str(error):
                raise
            outcome = "frozen"
            trial.runs -= 1
            thaw = trial.freeze()
            outputs = trial.run()
    _evict(client)
    if difference(outputs, twin.outputs(trial.runs)):  # some kernels are others in grad mode
        plain = _Trial(trial.entry)
        while plain.runs < trial.runs - 1:
            plain.run()
        if outcome == "frozen":
            plain.freeze()
        with torch.enable_grad():
            if where := difference(outputs, kept(plain.run())):
                raise _Wrong(f"differs: {where}")
    thaw()  # frozen ones may have other kernels, which round otherwise
    return outcome


def _nothing() -> None:
    pass


def _evict(client: Client) -> None:
    """Evict all of it."""
    client.acquire(_FILLER).release()


def _detached(trial: _Trial, attachment: Attachment, twin: _Twin) -> None:
    attachment.detach()
    _same(trial, trial.run(), twin)
    _same_state(trial, twin)
    if len(trial.places()) != twin.ties:
        raise _Wrong("what was tied is tied no longer")


def _held(trial: _Trial, attachment: Attachment) -> Any:
    return attachment.use(*attachment.components) if trial.subject.training else nullcontext()


def _same(trial: _Trial, outputs: Any, twin: _Twin) -> None:
    if where := difference(outputs, twin.outputs(trial.runs)):
        raise _Wrong(f"differs: {where}")


def _same_state(trial: _Trial, twin: _Twin) -> None:
    if where := difference(trial.state(), twin.state(trial.runs)):
        raise _Wrong(f"differs: state_dict(), {where}")


#: The tries of a class, each from the start, with a connection of its own.
TRIES = {"attached": _attached, "whole": _whole, "parts": _parts, "streamed": _streamed}


# --- messages of attach ------------------------------------------------------------------


def _found(client: Client, trial: _Trial, attachment: Attachment) -> dict[str, object]:
    """The components, and the share of the parameters' bytes that are in none of them."""
    spans = [(c.address, c.address + c.nbytes) for c in client.session.components.values()]
    places = trial.places()
    left = sum(
        nbytes
        for place, nbytes in places.items()
        if not any(start <= place[0] < end for start, end in spans)
    )
    return {
        "components": list(attachment.components),
        "left": left / max(1, sum(places.values())),
        "summary": attachment.summary,
    }


@contextmanager
def _warned() -> Iterator[list[str]]:
    """The client's warnings."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("swapd_client")
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
