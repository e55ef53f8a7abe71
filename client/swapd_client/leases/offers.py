"""The kept leases that a thread offers with an acquire: the daemon may end them to make room."""

from collections.abc import Callable, Mapping

from swapd.shared.protocol import LEASES_MAX, Release
from swapd_client.leases.book import Record
from swapd_client.leases.cache import Cache, Key
from swapd_client.leases.leases import Leases

Offered = Mapping[Key, tuple[Record, Release]]
End = Callable[[Key, Record], None]


def offer(cache: Cache, leases: Leases, thread: int, end: End) -> Offered:
    """Offer the thread's kept leases; return them with their releases.

    Nobody uses them until `settle`. `end` ends a lease that an earlier acquire may have spent.
    """
    offered: dict[Key, tuple[Record, Release]] = {}

    def add(key: Key, record: Record) -> None:
        if record.offered:  # to an acquire that failed: the daemon may have ended it
            return end(key, record)
        if len(offered) == LEASES_MAX:
            return
        record.offered = True  # first: an interrupt may come
        release = leases.offer_of(record)
        if release is None:
            record.offered = False
        else:
            offered[key] = record, release

    cache.each(add, lambda key, record: key[0] == thread and not record.is_asked)
    return offered


def settle(cache: Cache, leases: Leases, offered: Offered, end: End, *, spent: bool) -> None:
    """End the offered leases if the daemon has (`spent`); otherwise hold them again."""

    def settled(key: Key, record: Record) -> None:
        if spent:
            record.told = True
            end(key, record)
        else:
            leases.hold_again(record)
            record.offered = False

    cache.each(settled, lambda key, record: key in offered and offered[key][0] is record)
