"""A value of any type that a message can hold, made from the type itself."""

import itertools
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_numbers = itertools.count(1)


def sample(kind: Any) -> Any:
    """Some value of `kind`, never the default of a field, and never the same number twice."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is bool:
        return True
    if kind in (int, float):
        return kind(next(_numbers))
    if kind is str:
        return f"text {next(_numbers)}"
    if kind is bytes:
        return b"\x00bytes\xff"
    if origin is Literal:
        return arguments[-1]
    if origin is Annotated:
        return sample(arguments[0])
    if origin in (Union, types.UnionType):
        return sample(arguments[0])
    if origin is tuple:
        arguments = arguments[:1] * 2 if arguments[-1] is Ellipsis else arguments
        return tuple(sample(argument) for argument in arguments)
    if origin is list:
        return [sample(arguments[0])]
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: sample(f.type) for f in msgspec.structs.fields(kind)})
    raise TypeError(f"no sample of {kind!r}")


def bare(kind: type[msgspec.Struct]) -> Any:
    """A struct with its required fields only."""
    required = [f for f in msgspec.structs.fields(kind) if f.required]
    return kind(**{f.name: sample(f.type) for f in required})
