"""Weights that torch.distributed manages.

`python wrappers.py CASE FOLDER` runs the function CASE with the daemon in FOLDER.
"""

import sys
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from swapd_client import InvalidSource, connect
from tests.offload.modules import evict


def mesh_of_one() -> Any:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)


def tensor_parallel(folder: str) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model, x = mesh_of_one(), linears(), torch.ones(1, 64)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    expected = model(x)
    with connect(folder) as client, torch.no_grad():
        with client.attach({"dit": model}) as attachment:
            assert attachment.components["dit"].nbytes > 2 * 64 * 64 * 4, attachment
            evict(client, "dit")
            assert torch.equal(model(x), expected)
            evict(client, "dit")
            state = model.state_dict()
            assert all(isinstance(value, DTensor) for value in state.values())
            zeros = {name: value * 0 for name, value in state.items()}
            model.load_state_dict(zeros)
            assert not model(x).any()
            model.load_state_dict(state)
            evict(client, "dit")
        assert torch.equal(model(x), expected)
    print("held")  # noqa: T201


def fsdp(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh, model = mesh_of_one(), linears()
    fully_shard(model, mesh=mesh)
    with connect(folder) as client:
        try:
            client.attach({"dit": model})
        except InvalidSource as exc:
            print(exc)  # noqa: T201


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
