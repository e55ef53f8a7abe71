"""A stage whose session the daemon fenced in a step: others may have used its memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import swapd_client
from swapd_client import SessionFenced
from swapd_client.session.session import Session
from swapd_client.vllm.stage import Stage
from tests.guarantees.harness import MIB, PATIENCE_S, Daemon
from tests.offload.nursery import strict_daemon
from tests.plugin.test_stage import Model, Scene, X

#: `SOME` fits in free and idle memory, not in free memory alone; `MUCH` needs the stage's memory.
SOME, MUCH = 4 * MIB, 12 * MIB


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of 16 MiB that soon fences a session that does not answer."""
    with strict_daemon(ack_timeout=0.2) as daemon:
        yield daemon


def take(daemon: Daemon, taken: threading.Event, computed: threading.Event) -> None:
    with swapd_client.connect(daemon.folder, label="taker") as taker:
        for name, nbytes in (("some", SOME), ("much", MUCH)):
            taker.register(name, {"it": torch.full((nbytes // 4,), 3.0)})
            with taker.acquire(name):
                if name == "much":
                    taken.set()
                    computed.wait(PATIENCE_S)


@contextmanager
def its_memory_taken(stage: Stage, daemon: Daemon) -> Iterator[None]:
    """Within it, another session computes on the stage's memory, unknown to the stage's session."""
    taken, computed = threading.Event(), threading.Event()
    session = stage.client.session
    session.lifeline.send = lambda message, fds=(): None  # type: ignore[method-assign]
    taker = threading.Thread(target=take, args=(daemon, taken, computed), daemon=True)
    with session.life.lock:  # the session's own thread needs it
        taker.start()
        assert taken.wait(PATIENCE_S)
        yield
        assert session.error is None, "it has not heard of that"
        assert waits_for_the_end(session), "but knows that it must"
    computed.set()
    taker.join(PATIENCE_S)


def waits_for_the_end(session: Session) -> bool:
    """Whether `fenced` would wait until the session has heard of its end."""
    with pytest.MonkeyPatch.context() as patched:
        waited: list[None] = []
        patched.setattr(session.life, "await_end", lambda: waited.append(None))
        assert session.fenced() is None
    return bool(waited)


def stage_of(scene: Scene) -> tuple[Stage, Model]:
    """A stage with another idle component, which the daemon asks it to unmap."""
    stage, model = scene.stage("thinker")
    stage.client.register("idle", {"it": torch.zeros(MIB)})
    stage.client.acquire("idle").release()
    return stage, model


def test_what_was_computed_so_in_any_other_call_is_not_returned(
    scene: Scene, daemon: Daemon
) -> None:
    stage, model = stage_of(scene)
    with stage.using():
        right = model(X)

    def compute() -> None:
        with stage.using(), its_memory_taken(stage, daemon):
            assert not torch.equal(model(X), right)

    with pytest.raises(SessionFenced):
        compute()
    with stage.using():
        assert torch.equal(model(X), right)
