"""One load in this process; prints its cost as JSON.

`worker.py SIDE SMALL CHECKPOINT [ENDPOINT PID]`. The small checkpoint is loaded first, uncounted,
so that imports of a first load do not count.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import swapd_client
from swapd.bench.load import peak


def main(side: str, small: str, folder: str, *endpoint: str) -> None:
    torch.set_num_threads(1)
    first = SIDES[side](small, *endpoint)()
    load = SIDES[side](folder, *endpoint)
    daemon = int(endpoint[1]) if endpoint else None
    with peak(os.getpid(), daemon) as seen:
        began = time.perf_counter()
        kept = load()
        took = time.perf_counter() - began
    print(json.dumps({"load_s": took, "own": seen.own, "with_files": seen.with_files}))  # noqa: T201
    del kept, first


def _swapd(folder: str, endpoint: str, _: str) -> Callable[[], object]:
    from accelerate import init_empty_weights

    client = swapd_client.connect(endpoint, label="bench")
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    return lambda: (client.load(folder, folder, model), model)


def _on_one_core(folder: str, *endpoint: str) -> Callable[[], object]:
    """As `_swapd`, which then fills host copies by one thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return _swapd(folder, *endpoint)


def _from_pretrained(folder: str) -> Callable[[], object]:
    def load() -> object:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.data = tensor.data.clone()
        return model

    return load


SIDES: dict[str, Callable[..., Callable[[], object]]] = {
    "swapd": _swapd,
    "swapd on one core": _on_one_core,
    "from_pretrained": _from_pretrained,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
