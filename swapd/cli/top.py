"""`swapd top`: a live view of a device."""

import sys

import typer

from swapd.cli.choosing import Device, where
from swapd.cli.common import TIMEOUT_S, Endpoint, Timeout
from swapd.cli.live.feed import Feed
from swapd.shared.extras import needed

#: Longest wait for the feed at the end: a stopped daemon must not block the exit.
_LEAVE_S = 1.0


def top(
    endpoint: Endpoint = None,
    device: Device = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Watch a device live, full-screen: components, waiters and copies.

    Keys pin, unpin and evict the selected component, and show its records; ? lists them. It waits
    for a daemon that is restarted. NO_COLOR switches colours off.
    """
    with needed("swapd top"):
        from swapd.cli.live.app import Top

    feed = Feed(where(endpoint, device, timeout), timeout)
    feed.start()
    try:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise typer.BadParameter("needs a terminal; `swapd status` needs none")
        Top(feed, timeout).run()
    finally:
        feed.close(_LEAVE_S)
