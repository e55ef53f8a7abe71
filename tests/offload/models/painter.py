"""A process that runs one pipeline: first alone, then, on a signal, on a shared device.

`main` prints "ready", reads a line, runs, and prints "same" for each run with the same bits.
"""

import sys

import torch

from swapd_client import connect
from tests.offload.models import pictures
from tests.offload.models.twin import assert_equal, twin


def main(build: str, endpoint: str, rounds: int) -> None:
    torch.set_num_threads(1)
    subject = twin(getattr(pictures, build))
    with connect(endpoint, label=build) as client:
        attachment = client.attach(subject.model, prefix=build, enable_cpu_offload=True)
        print("ready", flush=True)  # noqa: T201
        sys.stdin.readline()
        for _ in range(rounds):
            assert_equal(subject.run(), subject.expected)
            print("same", flush=True)  # noqa: T201
        attachment.detach()
