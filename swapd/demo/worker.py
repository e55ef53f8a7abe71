"""One stage in a process of its own: builds it, then runs it, with or without swapd."""

import multiprocessing
import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from safetensors.torch import load, save

import swapd_client
from swapd.demo import stages
from swapd.spawn import end_with_parent

_here: dict[str, Any] = {}


def begin() -> None:
    """End with the demo: a pool's process would wait for ever for one that was killed."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it was killed while this process began
        os._exit(1)


def build(stage: str) -> int:
    torch.set_num_threads(1)
    _here.update(stage=stage, module=stages.build(stage), client=None)
    return sum(one.numel() * one.element_size() for one in _here["module"].parameters())


def join(endpoint: str) -> None:
    _here["client"] = swapd_client.connect(endpoint, label=_here["stage"])
    _here["client"].register(_here["stage"], _here["module"])


def run(prompt: bytes, sound_seed: int, inputs: bytes) -> tuple[bytes, float]:
    """Run the stage once: the thinker on a prompt and a sound, the others on `inputs`.

    Returns the outputs as safetensors, whose bytes are equal for bit-identical tensors; and the
    seconds of waiting for the lease.
    """
    stage, client, started = _here["stage"], _here["client"], time.perf_counter()
    lease: AbstractContextManager[object] = client.acquire(stage) if client else nullcontext()
    with lease:
        waited_s = time.perf_counter() - started if client else 0.0
        if stage == "thinker":
            sound = stages.generate_sound(sound_seed)
            return save(stages.run_thinker(_here["module"], prompt, sound)), waited_s
        later = stages.run_talker if stage == "talker" else stages.run_token2wav
        return save(later(_here["module"], load(inputs))), waited_s
