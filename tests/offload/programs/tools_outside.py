"""Tools that write to attached modules with absent weights: `python tools_outside.py FOLDER`.

It runs each of `TOOLS` in a child, which must die, and prints how the child ended. Its stderr goes
to stdout.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # so that no child has to
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from swapd_client import connect


def quantize(module: Any) -> None:
    quantize_(module, Int8WeightOnlyConfig())


def share_memory(module: Any) -> None:
    module[0].weight.share_memory_()


def by_hand(module: Any) -> None:
    module[0].weight.data.zero_()


TOOLS: tuple[Callable[[Any], None], ...] = (quantize, share_memory, by_hand)


def use(tool: Callable[[Any], None], folder: str) -> None:
    client = connect(folder, faults="explain")
    module = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
    attachment = client.attach({"child": module})
    tool(module)
    del attachment


def main(folder: str) -> None:
    os.dup2(1, 2)
    for tool in TOOLS:
        child = os.fork()
        if child == 0:
            use(tool, folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("status", os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
