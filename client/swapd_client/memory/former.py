"""Ranges of components whose daemon is gone: private memory now, and to be swapd's again.

CUDA graphs and others hold a tensor's address. So when it is registered with the next daemon, its
component takes back the range that it lies in. Lives here: which ranges there are, by where they
begin. May not live here: what is mapped there.
"""

from typing import NamedTuple

from swapd_client.memory.layout import Spans
from swapd_client.memory.place import Place


class Former(NamedTuple):
    """What was a component."""

    where: Place
    #: Of its storages; there is nothing else in its range.
    spans: Spans


#: By device, and by the address of the first storage. Each call below is one of a dict, so no lock
#: can be held when the process forks.
_all: dict[tuple[str, int], Former] = {}


def keep(device: str, former: Former) -> None:
    """A component of `device` ("" is the host) has become private memory."""
    if former.spans:
        _all[device, min(former.spans)[0]] = former
        if former.where.over:  # by now, as no tensor is left there
            forget(former.where)


def take(device: str, spans: Spans) -> Former | None:
    """What has its storages there, those and no others; from now on it is the caller's."""
    if not spans:
        return None
    key = device, min(spans)[0]
    former = _all.get(key)
    if former is None or former.spans != spans:
        return None
    return _all.pop(key, None)


def forget(where: Place) -> None:
    """The memory of this range is no more, as no tensor lies there."""
    for key, former in list(_all.items()):
        if former.where is where:
            _all.pop(key, None)
