"""Checks of what callers give, before it is used or sent."""

from collections.abc import Iterable
from typing import Any, NoReturn

from swapd_client.errors import InvalidArgument

A_SIZE = "a size, as in 4 << 30 or '4GiB'"


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


def check_name(given: object, argument: str = "name", give: str = "a name, as in 'vae'") -> None:
    own = getattr(given, "name", None)  # of a component
    check(argument, given, str, f"its name, {own!r}" if isinstance(own, str) else give)


def check_names(names: Iterable[object]) -> None:
    for name in names:
        check_name(name, give="names one by one, as in 'a', 'b'")


def check_seconds(
    given: object, argument: str = "timeout", give: str = "a number of seconds"
) -> None:
    if not (given is None or (isinstance(given, (int, float)) and given >= 0)):
        raise InvalidArgument(f"{argument}={given!r}: give {give}, or None")


class Uncopied:
    """Has descriptors and memory that a copy would close, and free, a second time."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise TypeError: called by `copy`, `copy.deepcopy` and `pickle`."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it belongs to this process. Leave it out of "
            "what you copy, and connect() in another process"
        )
