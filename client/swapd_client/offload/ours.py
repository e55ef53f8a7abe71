"""Marks the attributes that swapd puts on a module, and finds the module's own ones behind them.

Copies and pickles of a module have none of swapd's attributes: they have weights of their own, and
no client.
"""

from typing import Any


class Ours:
    """Base of every hook and attribute that swapd puts on a module."""

    __slots__ = ()

    def before(self, name: str) -> Any:
        """The module's own attribute of that name; None if it had none."""
        return None


def without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's `__dict__` without swapd's attributes; does not change its tables of hooks."""
    plain = {}
    for name, value in attributes.items():
        own = value
        while (ours := _ours(own)) is not None:
            own = ours.before(name)
        if own is not None or value is None:
            plain[name] = own
    tables = {name: value for name, value in plain.items() if _is_hooks(name, value)}
    # other tables have the same numbers, with options of the hooks
    gone = {number for t in tables.values() for number, hook in t.items() if _ours(hook)}
    for name, table in tables.items():
        if not gone.isdisjoint(table):
            plain[name] = type(table)((k, v) for k, v in table.items() if k not in gone)
    return plain


def _is_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _ours(value: object) -> Ours | None:
    """The marked object: the value itself, its `__self__`, or its function's mark."""
    function = getattr(value, "__func__", None)
    for one in (value, getattr(value, "__self__", None), getattr(function, "ours", None)):
        if isinstance(one, Ours):
            return one
    return None
