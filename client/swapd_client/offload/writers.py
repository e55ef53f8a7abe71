"""Methods of other libraries' classes that write to weights, and how to run each.

Lives here: their names, which many classes share. May not live here: how weights become writable
(`editing.py`), functions (`tools.py`). Other code that writes needs `attachment.edit(...)`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.offload import editing
from swapd_client.offload.weights_of import Weights

Module = torch.nn.Module


class Owner(Protocol):
    """The guard of a module."""

    weights: list[Weights]

    @property
    def module(self) -> Module:
        """The guarded module."""

    def writable(self, *modules: Module) -> AbstractContextManager[None]:
        """A `with` block in which code may write to the weights of modules and their submodules."""


#: Runs a method of the guarded module.
Runs = Callable[[Owner, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


def of(module: Module) -> dict[str, Runs]:
    """The methods of a module that need one of these, by name."""
    return {name: runs for name, runs in _RUNS.items() if _has(module, name)}


def _has(module: Module, method: str) -> bool:
    """Whether the class has the method; `getattr` on a stand-in finds those of its module."""
    return callable(getattr(type(module), method, None))


def _write(owner: Owner, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For methods that write to the weights of the module or its submodules."""
    with owner.writable(owner.module):
        return method(*args, **kwargs)


def _write_layers(owner: Owner, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For methods that merge adapters into layers one by one; `tools.py` makes each writable."""
    with editing.edits(owner.weights):
        return method(*args, **kwargs)


def _refuse_resize(owner: Owner, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    wanted = kwargs.get("new_num_tokens", args[0] if args else None)
    more = len(args) > 1 or kwargs.get("pad_to_multiple_of") is not None
    model: Any = owner.module
    there = model.get_input_embeddings()
    if wanted is None or (not more and wanted == getattr(there, "num_embeddings", None)):
        return method(*args, **kwargs)
    names = ", ".join(repr(one.name) for one in owner.weights)
    raise NotWhileAttached(
        f"{method.__name__}({wanted}) on a {type(model).__name__} changes the shape of "
        f"weights that are in swapd, as part of {names}. Nothing was changed. detach() first, then "
        "do this, then attach() again"
    )


_RUNS: Mapping[str, Runs] = {
    **dict.fromkeys(("fuse_lora", "unfuse_lora"), _write_layers),  # diffusers
    # it makes new private weights from the existing ones
    "fuse_qkv_projections": _write,  # diffusers
    "_rescale_layers": _write,  # RWKV, in its first forward in each mode
    "resize_token_embeddings": _refuse_resize,  # transformers
}
