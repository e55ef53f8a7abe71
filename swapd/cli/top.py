"""`swapd top`: a live view of a device."""

import sys

import typer

from swapd.cli.target import ChosenDaemon
from swapd.shared.extras import needed

#: Longest wait for the poller at the end: a stopped daemon must not block the exit.
_LEAVE_S = 1.0


def top(daemon: ChosenDaemon) -> None:
    """Watch a device live, full-screen: components, waiters and copies.

    Keys pin, unpin and evict the selected component, and show its records; ? lists them. It waits
    for a daemon that is restarted. NO_COLOR switches colours off.
    """
    with needed("swapd top"):
        from swapd.cli.live.app import Poller, Top

    poller = Poller(daemon.folder, daemon.timeout)
    poller.start()
    try:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise typer.BadParameter("needs a terminal; `swapd status` needs none")
        Top(poller, daemon.timeout).run()
    finally:
        poller.close(_LEAVE_S)
