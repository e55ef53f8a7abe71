"""A model that a forked child drops stays with its parent.

`python dropped_in_a_child.py FOLDER` prints the daemon's number of components afterwards.
"""

import gc
import os
import sys

import torch

from swapd_client import connect
from tests.offload.modules import TOKENS, Model, computed, evict


def main(folder: str) -> None:
    model, expected = computed(TOKENS, Model)
    client = connect(folder)
    client.attach(model)
    model(TOKENS)
    child = os.fork()
    if child == 0:
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    evict(client, "text_encoder", "transformer", "vae")
    assert torch.equal(model(TOKENS), expected)
    print(len(client.status().components))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
