"""The offloaders that work inside one process, each installed for the length of a block.

They move whole modules, so each gets the stand-in for the device that its hooks ask for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload import vllm_omni
from benchmarks.offload.model import modules
from benchmarks.offload.stand_in import DEVICE, HOST, StandIn

#: Offloads a pipeline onto a device until the block ends; then its modules are on the host again.
Installed = Callable[[Any, StandIn], AbstractContextManager[None]]


@contextmanager
def _and_back(pipeline: Any, device: StandIn) -> Iterator[None]:
    try:
        yield
    finally:
        for part in modules(pipeline).values():
            device.move(part, HOST)


@contextmanager
def nothing(pipeline: Any, device: StandIn) -> Iterator[None]:
    """No offloading: everything is on the device, which has room for it."""
    with _and_back(pipeline, device):
        for part in modules(pipeline).values():
            device.move(part, DEVICE)
        yield


@contextmanager
def diffusers_model(pipeline: Any, device: StandIn) -> Iterator[None]:
    """`enable_model_cpu_offload`: diffusers' and accelerate's own code."""
    with _and_back(pipeline, device), device.installed():
        pipeline.enable_model_cpu_offload(device=DEVICE)
        try:
            yield
        finally:
            pipeline.remove_all_hooks()


@contextmanager
def diffusers_groups(pipeline: Any, device: StandIn) -> Iterator[None]:
    """`enable_group_offload`, block by block, without streams: diffusers' own hooks and groups.

    Only the moves of a group's tensors are replaced, because it does not use `Module.to` alone.
    """
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.group_offloading import _GROUP_OFFLOADING, ModuleGroup

    def mover(target: torch.device) -> Callable[[Any], None]:
        def move(group: Any) -> None:
            tensors = [t for m in group.modules for t in (*m.parameters(), *m.buffers())]
            device.move_tensors([*tensors, *group.parameters, *group.buffers], target)

        return move

    usual = ModuleGroup.onload_, ModuleGroup.offload_
    ModuleGroup.onload_, ModuleGroup.offload_ = mover(DEVICE), mover(HOST)
    with _and_back(pipeline, device):
        try:
            pipeline.enable_group_offload(
                onload_device=DEVICE, offload_type="block_level", num_blocks_per_group=1
            )
            yield
        finally:
            for part in modules(pipeline).values():
                HookRegistry.check_if_exists_or_initialize(part).remove_hook(
                    _GROUP_OFFLOADING, recurse=True
                )
            ModuleGroup.onload_, ModuleGroup.offload_ = usual


@contextmanager
def vllm_omni_rule(pipeline: Any, device: StandIn) -> Iterator[None]:
    """The rule of vLLM-Omni's `enable_cpu_offload`, in few lines: a model of it, not its code.

    Before an encoder runs, the DiTs are copied back to the host. Before a DiT runs, the encoders
    and the other DiTs are; then it is copied in, and stays. The VAE is always on the device, and
    the encoders are at the start.
    """
    parts = modules(pipeline)
    dits = {k: v for k, v in parts.items() if k.startswith("transformer")}
    encoders = {k: v for k, v in parts.items() if "encoder" in k}

    def swap(rivals: list[torch.nn.Module], module: torch.nn.Module, *_: object) -> None:
        for rival in rivals:
            device.move(rival, HOST)
        device.move(module, DEVICE)

    def rivals_of(name: str) -> list[torch.nn.Module]:
        others = {**encoders, **dits} if name in dits else dits
        return [other for key, other in others.items() if key != name]

    with _and_back(pipeline, device):
        for name, part in parts.items():
            if name not in dits:
                device.move(part, DEVICE)
        handles = [
            part.register_forward_pre_hook(partial(swap, rivals_of(name)))
            for name, part in {**dits, **encoders}.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def vllm_omni_code(folder: Path) -> Installed:
    """vLLM-Omni's own hooks, from a wheel unpacked in `folder`. Raises: ImportError."""
    backend = vllm_omni.load(folder)

    @contextmanager
    def installed(pipeline: Any, device: StandIn) -> Iterator[None]:
        parts = modules(pipeline)
        dits = [part for name, part in parts.items() if name.startswith("transformer")]
        encoders = [part for name, part in parts.items() if "encoder" in name]
        with _and_back(pipeline, device), vllm_omni.moving_by(backend, device.move):
            for name, part in parts.items():
                if not name.startswith("transformer"):
                    device.move(part, DEVICE)
            backend.apply_sequential_offload(dits, encoders, DEVICE, pin_memory=False)
            try:
                yield
            finally:
                backend.remove_sequential_offload([*dits, *encoders])
                vllm_omni.restore([*dits, *encoders])

    return installed
