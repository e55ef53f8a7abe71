"""The kept leases that a thread offers with an acquire: the daemon may end them to make room."""

from collections.abc import Callable, Mapping

from swapd.shared.protocol import LEASES_MAX, Release
from swapd_client.leases.book import Record
from swapd_client.leases.cache import Cache, Key
from swapd_client.leases.leases import Leases

Offered = Mapping[Key, tuple[Record, Release]]
End = Callable[[Key, Record], None]


def offer(cache: Cache, leases: Leases, thread: int, end: End) -> Offered:
    """The kept leases of a thread that the daemon may end if the next request needs a load.

    Nobody uses them from here on until they are settled. `end`: ends one.
    """
    offered: dict[Key, tuple[Record, Release]] = {}

    def add(key: Key, record: Record) -> None:
        if record.offered:  # to an acquire that failed: the daemon may have ended it then
            return end(key, record)
        if len(offered) == LEASES_MAX:
            return
        record.offered = True  # an interrupt may come before the next line
        release = leases.offer_of(record)
        if release is None:
            record.offered = False
        else:
            offered[key] = record, release

    cache.each(add, lambda key, record: key[0] == thread and not record.is_asked)
    return offered


def settle(cache: Cache, leases: Leases, offered: Offered, end: End, *, spent: bool) -> None:
    """The daemon has ended these, or it has not."""

    def settled(key: Key, record: Record) -> None:
        if spent:
            record.told = True
            end(key, record)
        else:
            leases.hold_again(record)
            record.offered = False

    cache.each(settled, lambda key, record: key in offered and offered[key][0] is record)
