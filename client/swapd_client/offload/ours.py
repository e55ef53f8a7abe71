"""What swapd puts on a module, and how the module is without it.

Copies of a module, and what is pickled of it, have none of it: they compute with weights of
their own, and know of no client.
"""

from typing import Any


class Ours:
    """Base of every hook and every attribute that swapd puts on a module of somebody else's."""

    __slots__ = ()

    #: What the module itself had in its place, if it had anything.
    _before: Any = None


def without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's `__dict__` less what is swapd's; the tables of its hooks are not changed."""
    plain = {name: value for name, value in attributes.items() if not _is_ours(value)}
    for name, value in attributes.items():
        if isinstance(value, Ours) and value._before is not None:
            plain[name] = value._before
    tables = {name: value for name, value in plain.items() if _is_hooks(name, value)}
    # a hook's number is in other tables as well, which say how it is to be called
    gone = {number for t in tables.values() for number, hook in t.items() if _is_ours(hook)}
    for name, table in tables.items():
        if not gone.isdisjoint(table):
            plain[name] = type(table)((k, v) for k, v in table.items() if k not in gone)
    return plain


def _is_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _is_ours(value: object) -> bool:
    return isinstance(value, Ours) or isinstance(getattr(value, "__self__", None), Ours)
