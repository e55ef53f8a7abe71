"""A context for calls of a stage's modules before its first step, which leave no trace in them.

`torch.compile` binds code to the hooks present at its first call, and never compiles code that ran
under a dispatch mode. A module may also prepare itself in its first call.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

#: Attributes that are not restored: a call that registers weights moves them into these.
_REGISTERED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def eager(models: Iterable[Module] = ()) -> Iterator[None]:
    """In the block, torch compiles nothing in this process, and vLLM no module in `models`.

    Afterwards the attributes of these modules are as before, except parameters, buffers and
    submodules.
    """
    modules = {id(module): module for model in models for module in model.modules()}.values()
    before = [(vars(module), _copied(vars(module))) for module in modules]
    try:
        for module in modules:
            if getattr(module, "do_not_compile", None) is False:  # vLLM's
                module.do_not_compile = True  # type: ignore[assignment]
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for attributes, saved in before:
            _restore(attributes, saved)


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if type(value) in (dict, list, set) else None)
        for name, value in attributes.items()
        if name not in _REGISTERED
    }


def _restore(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - saved.keys() - {*_REGISTERED}:
        del attributes[name]
    for name, (value, contents) in saved.items():
        attributes[name] = value
        if contents is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)
