"""A stage of a pipeline, alone. `python stage.py CASE FOLDER ...` runs the function CASE."""

import ctypes
import sys

from swapd_client.vllm.options import Options, options_of
from swapd_client.vllm.stage import Stage


def read_out_of_turn(folder: str, faults: str) -> None:
    given = {"endpoint": folder} | ({"faults": faults} if faults else {})
    stage = Stage.connect(options_of({"swapd": given}, "thinker"), "thinker", gpu=None)
    part = stage.client.register("thinker", {"x": bytes(100)})
    ctypes.string_at(part.address, 8)


def load(folder: str, nbytes: str) -> None:
    """Print the free device memory during loading, and afterwards."""
    stage = Stage.connect(Options(endpoint=folder), "s", gpu=0)
    with stage.memory.loading(int(nbytes)):
        print(stage.client.status().device_free_bytes)  # noqa: T201
    print(stage.client.status().device_free_bytes)  # noqa: T201
    stage.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
