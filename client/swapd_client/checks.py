"""Checks of what callers give, before it is used or sent."""

from collections.abc import Iterable
from typing import Any

from swapd_client.errors import InvalidArgument

A_NAME = "a name, as in 'vae'"


def check(argument: str, given: object, kind: Any, give: str) -> None:
    """Raise InvalidArgument unless `given` is of `kind`, a class or a union of them."""
    if not isinstance(given, kind):
        raise InvalidArgument(f"{argument}={given!r}: give {give}")


def names_in(argument: str, names: Any, given: object = None) -> list[str]:
    """Return names as a list; a text is one name. `given`: the argument that `names` is part of.

    Raises: InvalidArgument.
    """
    one = isinstance(names, str) or not isinstance(names, Iterable)
    found: list[str] = [names] if one else list(names)
    for name in found:
        if not isinstance(name, str):
            whole = names if given is None else given
            raise InvalidArgument(f"{argument}={whole!r}: give names, as in ['vae', 'dit']")
    return found


def check_names(names: Iterable[object]) -> None:
    for name in names:
        if not isinstance(name, str):
            own = getattr(name, "name", None)
            named = isinstance(own, str)
            hint = f"give its name, {own!r}" if named else "give names one by one, as in 'a', 'b'"
            raise InvalidArgument(f"{name!r} is not the name of a component: {hint}")


def check_seconds(
    given: object, argument: str = "timeout", give: str = "a number of seconds"
) -> None:
    if not (given is None or (isinstance(given, (int, float)) and given >= 0)):
        raise InvalidArgument(f"{argument}={given!r}: give {give}, or None")
