"""A stage whose daemon fenced its session in a step: it computed on memory that another session
had by then, so nothing of that step counts.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import swapd_client
from tests.guarantees.harness import Daemon
from tests.vllm.engines import MIB, Engine, EngineDied, EngineFailed, Scene, on_swapd, plain
from tests.vllm.test_kv import ALONE, TOKENS
from tests.vllm.test_tensor_parallel import HEARS_AHEAD

#: Room for the stage, with its KV cache if that takes turns, its other component, and 10 MiB.
BUDGETS = {"auto": "128MiB", "private": "120MiB"}
#: Nobody who runs needs as long, on a busy machine either; the stage is stopped for longer.
ACK_S = 1.0
#: The memory that another session takes in the end, beside that cache.
TAKEN = 112 * MIB
#: More than the free memory, and not more than the idle components have.
SOME = 12 * MIB
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 * MIB,
    "enable_prefix_caching": True,
}


def await_standstill(pid: int) -> None:
    """Wait until it has stopped."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


@contextmanager
def its_memory_taken(daemon: Daemon, taken: int = TAKEN, some: int = SOME) -> Iterator[None]:
    """While in it somebody else has the stage's memory. `taken`, `some`: as above."""
    with swapd_client.connect(daemon.folder, label="taker") as taker:
        taker.register("all", {"it": torch.full((taken // 4,), 3.0)})
        taker.register("some", {"it": torch.zeros(some // 4)})
        with taker.acquire("some"):
            pass
        with taker.acquire("all"):
            assert daemon.watch.seen("Fence")
            yield


def frozen_in_a_request(
    scene: Scene, daemon: Daemon, settings: dict[str, object], *, ahead: bool
) -> Engine:
    """An engine that has made some steps, and has computed the last on another's memory."""
    stage = scene.process("talker")
    if ahead:
        stage.imports("tests.vllm.running_ahead")
    of_engine = {
        "worker_cls": "tests.vllm.freezing.Worker",
        "async_scheduling": ahead,
        **OPTIONS,
    }
    stage.start(**on_swapd(scene.models / "talker", daemon.folder, settings, **of_engine))
    stage.ask(ALONE[0], TOKENS)
    stage.step(3)
    stage.call("freeze")
    stage.begin("finish")
    await_standstill(stage.pid)
    return stage


@pytest.mark.parametrize(
    ("kv", "ahead"),
    [("auto", False), ("auto", True), ("private", True)],
    ids=["auto, sync", "auto, async", "private, async"],
)
def test_what_a_stage_computed_while_its_session_was_ended_does_not_count(
    scene: Scene, kv: str, *, ahead: bool
) -> None:
    """`ahead`: with async scheduling, where the next step begins before vLLM reads this one."""
    (alone,) = scene.start(plain(scene.models / "talker", **OPTIONS))
    daemon = scene.daemon(budget=BUDGETS[kv], ack_timeout=ACK_S)
    stage = frozen_in_a_request(scene, daemon, {"kv": kv}, ahead=ahead)
    with its_memory_taken(daemon):
        os.kill(stage.pid, signal.SIGCONT)
        if kv == "private":
            with pytest.raises(EngineFailed) as failed:
                stage.result()
            assert failed.value.kind == "Stopped"
            return
        assert stage.result() == alone.generate(ALONE[0], TOKENS)
    assert stage.generate(ALONE[1], TOKENS) == alone.generate(ALONE[1], TOKENS)


def test_a_stage_ends_whose_second_rank_computed_so(scene: Scene) -> None:
    """vLLM listens to the first one, and would wait for the other for good in the next step."""
    first, second = scene.daemon(budget="96MiB"), scene.daemon(budget="96MiB", ack_timeout=0.2)
    stage = scene.process("talker")
    stage.imports("tests.vllm.running_ahead")
    stage.fork_workers()
    of_engine = {
        "worker_cls": "tests.vllm.freezing.Worker",
        "scheduler_cls": HEARS_AHEAD,
        "async_scheduling": True,
        "tensor_parallel_size": 2,
        **OPTIONS,
    }
    pattern = first.folder.with_name("d{gpu}")
    stage.start(**on_swapd(scene.models / "talker", pattern, {"kv": "auto"}, **of_engine))
    stage.ask(ALONE[0], TOKENS)
    stage.step(3)
    _, pid = stage.call("freeze", 1)
    stage.begin("finish")
    await_standstill(pid)
    status = second.status()
    free = status.budget_bytes - status.used_bytes
    with its_memory_taken(second, status.budget_bytes - 16 * MIB, free + 2 * MIB):
        os.kill(pid, signal.SIGCONT)
        with pytest.raises((EngineFailed, EngineDied)):
            stage.result()
    assert "rank 1 of talker.tp1 ends: Stopped" in stage.log
