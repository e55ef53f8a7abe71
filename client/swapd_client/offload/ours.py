"""What swapd puts on a module, and how the module is without it.

Copies of a module, and what is pickled of it, have none of it: they compute with weights of
their own, and know of no client.
"""

from typing import Any


class Ours:
    """Base of every hook and every attribute that swapd puts on a module of somebody else's."""

    __slots__ = ()

    def before(self, name: str) -> Any:
        """What the module itself had there, of its own; None if that is nothing."""
        return None


def without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's `__dict__` less what is swapd's; the tables of its hooks are not changed."""
    plain = {}
    for name, value in attributes.items():
        own = value
        while (ours := _ours(own)) is not None:
            own = ours.before(name)
        if own is not None or value is None:
            plain[name] = own
    tables = {name: value for name, value in plain.items() if _is_hooks(name, value)}
    # a hook's number is in other tables as well, which say how it is to be called
    gone = {number for t in tables.values() for number, hook in t.items() if _ours(hook)}
    for name, table in tables.items():
        if not gone.isdisjoint(table):
            plain[name] = type(table)((k, v) for k, v in table.items() if k not in gone)
    return plain


def _is_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _ours(value: object) -> Ours | None:
    """The object of ours that this is, or is a method of, or that its function is marked by."""
    function = getattr(value, "__func__", None)
    for one in (value, getattr(value, "__self__", None), getattr(function, "ours", None)):
        if isinstance(one, Ours):
            return one
    return None
