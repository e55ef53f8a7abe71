"""Methods of other libraries' classes that write to weights, and how to run each.

Lives here: their names, which many classes share. May not live here: how weights become writable
(`editing.py`). Other code that writes needs `attachment.edit(...)`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
    found = {name: runs for name, runs in _RUNS.items() if _has(module, name)}
    return found | dict.fromkeys(_OF_LAYERS, _write) if is_adapted(module) else found


def is_adapted(module: Module) -> bool:
    """Whether it is a layer with adapters, as in PEFT, that merge into its weights."""
    return "base_layer" in module._modules and all(_has(module, name) for name in _OF_LAYERS)


def _has(module: Module, method: str) -> bool:
    """Whether the class has the method; `getattr` on a stand-in finds those of its module."""
    return callable(getattr(type(module), method, None))


def _write(owner: Owner, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For methods that write to the weights of the module or its submodules."""
    with owner.writable(owner.module):
        return method(*args, **kwargs)


def _write_layers(owner: Owner, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For methods that write to adapted layers one by one: copies one layer at a time."""
    with editing.edits(owner.weights), _layers_written(owner):
        return method(*args, **kwargs)


@contextmanager
def _layers_written(owner: Owner) -> Iterator[None]:
    """Have adapters that were added after `attach` write to copies, too."""
    put: list[tuple[dict[str, Any], str]] = []
    try:
        for layer in owner.module.modules():
            if not is_adapted(layer):
                continue
            for name in _OF_LAYERS:
                if name not in vars(layer):
                    vars(layer)[name] = _on_copies(getattr(layer, name), layer, owner)
                    put.append((vars(layer), name))
        yield
    finally:
        for attributes, name in put:
            del attributes[name]


def _on_copies(method: Callable[..., Any], layer: Module, owner: Owner) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with owner.writable(layer):
            return method(*args, **kwargs)

    return run


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


#: Methods of one adapted layer.
_OF_LAYERS = ("merge", "unmerge")

_RUNS: Mapping[str, Runs] = {
    **dict.fromkeys(("fuse_lora", "unfuse_lora"), _write_layers),  # diffusers
    **dict.fromkeys(
        ("merge_adapter", "unmerge_adapter", "merge_and_unload"), _write_layers
    ),  # PEFT
    # these make new private weights from the existing ones, and read those outside of any call
    **dict.fromkeys(("fuse_qkv_projections", "add_weighted_adapter"), _write),  # diffusers, PEFT
    "_rescale_layers": _write,  # RWKV, in its first forward in each mode
    "resize_token_embeddings": _refuse_resize,  # transformers
}
