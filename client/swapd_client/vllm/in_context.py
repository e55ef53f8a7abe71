"""Overrides of methods that differ from the method above by a context alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)


def during(
    context: Callable[[Any], AbstractContextManager[object]], *names: str
) -> Callable[[_Kind], _Kind]:
    """Override these methods of a class: each runs as before, in `context(self)`."""

    def override(kind: _Kind) -> _Kind:
        for name in names:
            setattr(kind, name, _in_context(kind, name, context))
        return kind

    return override


def _in_context(
    kind: type, name: str, context: Callable[[Any], AbstractContextManager[object]]
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return getattr(super(kind, self), name)(*args, **kwargs)

    call.__name__, call.__qualname__ = name, f"{kind.__name__}.{name}"
    return call
