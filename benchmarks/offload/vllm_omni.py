"""vLLM-Omni's model-level offloader, run without vLLM.

Imports only the module with the hooks from the package, and its building blocks. Stand-ins replace
its other imports: a logger, the platform (whose calls do nothing), and names that only its
configuration needs.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def load(folder: Path) -> Any:
    """The module `sequential_backend` of the package in `folder`. Raises: ImportError."""
    root = folder / "vllm_omni"
    if not (root / "diffusion" / "offloader" / "sequential_backend.py").exists():
        raise ImportError(f"{folder} does not hold an unpacked wheel of vllm-omni")
    _package("vllm", None)
    _module("vllm.logger", init_logger=logging.getLogger)
    _package("vllm_omni", root)
    _module("vllm_omni.platforms", current_omni_platform=_Platform())
    _package("vllm_omni.diffusion", root / "diffusion")
    _module("vllm_omni.diffusion.data", OmniDiffusionConfig=None, **_ANY_CHECK)
    _package("vllm_omni.diffusion.models", None)
    _module("vllm_omni.diffusion.models.interface", SupportsComponentDiscovery=object)
    hooks = _package("vllm_omni.diffusion.hooks", root / "diffusion" / "hooks")
    _package("vllm_omni.diffusion.offloader", root / "diffusion" / "offloader")
    base = import_module("vllm_omni.diffusion.hooks.base")
    vars(hooks).update(HookRegistry=base.HookRegistry, ModelHook=base.ModelHook)
    return import_module("vllm_omni.diffusion.offloader.sequential_backend")


@contextmanager
def moving_by(
    backend: Any, move: Callable[[torch.nn.Module, torch.device], bool]
) -> Iterator[None]:
    """Make its hooks use `move` for their copies."""
    hook = backend.SequentialOffloadHook
    usual = hook.__dict__["_move_params"]
    hook._move_params = staticmethod(lambda module, device, **_: move(module, device))
    try:
        yield
    finally:
        hook._move_params = usual


def restore(modules: Sequence[torch.nn.Module]) -> None:
    """Remove the wrappers of its hooks: they leave their registry and their forward behind."""
    for module in modules:
        for name in ("forward", "_hook_registry", "_omni_original_forward"):
            vars(module).pop(name, None)


_ANY_CHECK: dict[str, Any] = {"validate_dlo_host_registration_options": lambda **_: 0.0}


class _Platform:
    """A device without a driver: there is no cache to empty, and no work to wait for."""

    def is_xpu(self) -> bool:
        return False

    def empty_cache(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def get_free_memory(self) -> int:
        return 0


def _package(name: str, folder: Path | None) -> ModuleType:
    made = _module(name)
    made.__path__ = [str(folder)] if folder else []
    return made


def _module(name: str, **contents: Any) -> ModuleType:
    made = sys.modules.setdefault(name, ModuleType(name))
    vars(made).update(contents)
    return made
