"""Ranges of components whose daemon is gone: private memory, for the next component to take back.

CUDA graphs and other code hold a tensor's address. So when the tensor is registered with the next
daemon, its component takes back the tensor's range. Lives here: these ranges, by their start. May
not live here: mappings.
"""

from typing import NamedTuple

from swapd_client.memory.layout import Spans
from swapd_client.memory.place import Place


class Former(NamedTuple):
    """A former component."""

    where: Place
    #: Its storages; nothing else is in its range.
    spans: Spans


#: By device, and by the address of the first storage. Each function below makes one call of the
#: dict, so no lock can be held at a fork.
_all: dict[tuple[str, int], Former] = {}


def keep(device: str, former: Former) -> None:
    """A component of `device` ("" is the host) has become private memory."""
    if former.spans:
        _all[device, min(former.spans)[0]] = former
        if former.where.over:  # freed already, since no tensor is left there
            forget(former.where)


def take(device: str, spans: Spans) -> Former | None:
    """The former component with exactly these storages. The caller owns it from then on."""
    if not spans:
        return None
    key = device, min(spans)[0]
    former = _all.get(key)
    if former is None or former.spans != spans:
        return None
    return _all.pop(key, None)


def forget(where: Place) -> None:
    """The memory of this range is free, since no tensor is left there."""
    for key, former in list(_all.items()):
        if former.where is where:
            _all.pop(key, None)
