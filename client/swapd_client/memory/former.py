"""Ranges of components whose daemon is gone: private memory, for the next component to take back.

CUDA graphs and other code hold a tensor's address. So when the tensor is registered with the next
daemon, its component takes back the tensor's range. Lives here: these ranges, by their start. May
not live here: mappings.
"""

import atexit
from typing import NamedTuple

from swapd.shared.fds import OwnedFd
from swapd_client.memory.layout import Spans
from swapd_client.memory.place import Place


class Former(NamedTuple):
    """A former component."""

    where: Place
    #: Its storages; nothing else is in its range.
    spans: Spans
    #: Its sealed host copy, of which the range is a private mapping; owned by this.
    master: OwnedFd | None = None

    def close(self) -> None:
        """Close the host copy."""
        if self.master is not None:
            self.master.close()


#: By device, and by the address of the first storage. Each function below makes one call of the
#: dict, so no lock can be held at a fork.
_all: dict[tuple[str, int], Former] = {}


def keep(device: str, former: Former) -> None:
    """A component of `device` ("" is the host) has become private memory."""
    if not former.spans:
        return former.close()
    key = device, min(former.spans)[0]
    if (older := _all.pop(key, None)) is not None:
        older.close()
    _all[key] = former
    if former.where.over:  # freed already, since no tensor is left there
        forget(former.where)


def find(device: str, spans: Spans) -> Former | None:
    """The former component with exactly these storages."""
    former = _all.get((device, min(spans)[0])) if spans else None
    return former if former is not None and former.spans == spans else None


def forget(where: Place) -> None:
    """The memory of this range is free, since no tensor is left there; or a component has it."""
    for key, former in list(_all.items()):
        if former.where.address == where.address:
            _all.pop(key, former).close()


@atexit.register
def _close_all() -> None:
    for former in _all.values():
        former.close()
