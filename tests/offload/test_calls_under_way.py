"""Calls that other threads make of a model while it is attached, and while it is detached."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, InUse
from swapd_client.offload import attach_barrier
from swapd_client.offload.hooks import Hook, hook_of
from swapd_client.offload.stream import StreamPass
from tests.guarantees.harness import Daemon
from tests.offload.modules import WIDTH, computed, leases, seeded
from tests.offload.test_streaming import Dit
from tests.offload.test_streaming import X as WIDE
from tests.processes import output_of

X = torch.ones(2, WIDTH)

#: Three calls begin before `attach`, and one while it waits for these.
PROGRAM = """
    import logging
    import sys
    import threading

    import torch
    from torch import nn

    import swapd_client
    from tests.offload.modules import WIDTH, evict, seeded
    from tests.offload.test_calls_under_way import Said, Stops, X, is_waiting, stopping

    model, twin = seeded(Stops), seeded(Stops)
    expected = twin(X)
    wrong, threads = [], []

    def begin(call):
        inside = stopping(model, go)

        def run():
            with torch.no_grad():
                if not torch.equal(call(X), expected):
                    wrong.append(call)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return inside

    go = threading.Event()
    for call in (model, model.directly, model.nested):
        begin(call).wait()

    def waits():
        inside = begin(model)
        while not (inside.is_set() or is_waiting(threads[-1])):
            pass
        if inside.is_set():
            wrong.append(waits)
        go.set()

    with Said("attach waits for calls", waits):
        with swapd_client.connect(sys.argv[1], faults="explain") as client:
            attachment = client.attach({"m": model}, ".")
            evict(client, "m")
            go.set()
            for thread in threads:
                thread.join()
            assert not wrong
            evict(client, "m")
            with torch.no_grad():
                assert torch.equal(model(X), expected)
            print("done")
"""


class Said(logging.Handler):
    """A `with` block in which a message of the client's calls a function, once."""

    def __init__(self, words: str, then: Callable[[], object]) -> None:
        super().__init__()
        self._words = words
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._words):
            self._then()

    def __enter__(self) -> "Said":
        logging.getLogger("swapd_client").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("swapd_client").removeHandler(self)


def is_waiting(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


class Stops(nn.Module):
    """Calls a function before it reads the weights of its second layer."""

    inside: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.directly(x)

    def directly(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.inside()
        return nn.functional.linear(x, self.second.weight, self.second.bias)

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self(x))  # type: ignore[no-any-return]


def test_calls_that_began_before_attach_read_their_own_weights(daemon: Daemon) -> None:
    assert output_of(PROGRAM, daemon.folder) == "done\n"


#: Garbage whose finalizers start threads.
COLLECTED = """
    import gc
    import threading
    import weakref

    from swapd_client.offload.attach_barrier import frames
    from tests.garbage import THREADS, collected_in

    def look():
        assert len(frames()) > THREADS
        assert gc.isenabled()

    def before(one):
        weakref.finalize(one, lambda: threading.Thread(target=int).start())

    collected_in(look, before)
    print("done")
"""


def test_garbage_that_starts_threads_does_not_keep_attach_from_seeing_calls() -> None:
    """CPython before 3.11.9 collects it under a lock of its own that a new thread needs."""
    assert output_of(COLLECTED) == "done\n"


def stopping(model: Stops, go: threading.Event) -> threading.Event:
    """The next calls wait for `go`. Returns an event: one of them waits."""
    reached = threading.Event()

    def inside() -> None:
        reached.set()
        go.wait()

    model.inside = inside
    return reached


@pytest.fixture
def stopped() -> Iterator[Any]:
    """A model in a call that waits for the end of the test."""
    model = seeded(Stops)
    go = threading.Event()
    inside = stopping(model, go)
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(X)), name="server")
    thread.start()
    inside.wait()
    model.inside = lambda: None
    yield model
    go.set()
    thread.join()
    assert torch.equal(outputs[0], seeded(Stops)(X))


def test_a_call_that_does_not_end_is_named_and_nothing_is_attached(
    client: Client, stopped: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_barrier, "PATIENCE_S", 0.0)
    with pytest.raises(InUse, match=r"Stops in thread 'server'"):
        client.attach({"m": stopped}, ".")
    assert leases(client) == {}
    assert "_call_impl" not in vars(stopped)
    with client.attach({"other": seeded(Stops)}, "."):  # its calls are others
        pass


class Pauses(Dit):
    """Calls a function before its third block."""

    inside: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for number, block in enumerate(self.blocks):
            if number == 2:
                self.inside()
            x = block(x)
        return self.proj_out(x)  # type: ignore[no-any-return]

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)  # type: ignore[no-any-return]


def test_a_call_that_has_its_lease_but_has_not_begun_is_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need the room of what it holds, so it must not wait for them at its first block."""
    model, expected = computed(WIDE, Pauses)
    go, paused, entered = threading.Event(), threading.Event(), threading.Event()
    outputs: list[torch.Tensor] = []

    def pause(reached: threading.Event) -> None:
        if threading.current_thread() is not threading.main_thread() and not go.is_set():
            reached.set()
            go.wait()

    enter = StreamPass.enter

    def entering(self: StreamPass) -> None:
        enter(self)
        if paused.is_set():
            pause(entered)

    def call(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.inference_mode():
            outputs.append(run(WIDE))

    def begin_one_more() -> None:
        threads[2].start()
        while not is_waiting(threads[2]):
            pass
        go.set()

    monkeypatch.setattr(StreamPass, "enter", entering)
    model.inside = lambda: pause(paused)
    with client.attach({"dit": model}, resident=0) as attachment:
        calls = model, model, model.generate
        threads = [threading.Thread(target=call, args=(run,), daemon=True) for run in calls]
        for thread, reached in zip(threads, (paused, entered), strict=False):
            thread.start()
            reached.wait()
        with Said("attach waits for calls", begin_one_more):
            attachment.refresh()
        for thread in threads:
            thread.join()
        assert all(torch.equal(output, expected) for output in outputs)
        assert len(outputs) == 3


class Fleeting(Hook):
    """Has lost its door, or gate, when it is asked for it once more."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("door", "gate"):
            setattr(self, name, None)
        return found


def test_a_hook_that_another_thread_takes_away_as_a_call_begins_is_used_once(
    client: Client,
) -> None:
    model, expected = computed(X, Stops)
    passed: list[nn.Module] = []
    with client.attach({"m": model}, "."), torch.inference_mode():
        hook = hook_of(model)
        assert hook is not None
        hook.door, hook.__class__ = passed.append, Fleeting
        assert torch.equal(model(X), expected)
        assert passed == [model]


def test_an_interrupt_while_attach_waits_leaves_nothing_attached(
    client: Client, stopped: Stops
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with Said("attach waits for calls", interrupt), pytest.raises(KeyboardInterrupt):
        client.attach({"m": stopped}, ".")
    assert leases(client) == {}
    assert "_call_impl" not in vars(stopped)
