"""`swapd log -f`: the file as it grows, until the daemon ends."""

import select
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from swapd.cli.common import ask, say_error
from swapd.cli.log_views import LogView
from swapd.log.reader import Tail, last_run
from swapd.shared.fds import OwnedFd
from swapd.shared.system import open_pidfd
from swapd_client import Client, DaemonStopping
from swapd_client.session.endpoint import find, resolve

#: Seconds between two looks at the file; and looks without a record after which the view shows the
#: lines that it held back.
LOOK_S = 0.1
QUIET_LOOKS = 5
#: Longest wait for the last records of a daemon that ends.
LAST_S = 5.0


def follow_log(endpoint: str | None, view: LogView, lines: int | None, timeout: float) -> None:
    """Show the last `lines` of the log, then its growth, until the daemon ends.

    Blocks. Raises: NotRunning, NotAnswering, OSError; SystemExit(1) if the daemon died.
    """
    with ExitStack() as opened:
        folder = opened.enter_context(find(resolve(endpoint, None)))
        client = opened.enter_context(ask(endpoint, "log", timeout))
        if (daemon := _process(folder.holder())) is not None:
            opened.enter_context(daemon)
        tail = opened.enter_context(closing(Tail(Path(client.status(timeout=timeout).swap_log))))
        view.show(last_run(tail.read()), lines, more=True)
        quiet = 0
        while not select.select([client.session.life.ended.fileno()], [], [], LOOK_S)[0]:
            fresh = tail.read()
            quiet = 0 if fresh else quiet + 1
            if fresh or (view.keeps_back and quiet == QUIET_LOOKS):
                view.show(fresh, more=bool(fresh))
        if daemon is not None:
            select.select([daemon.fileno()], [], [], LAST_S)
        view.show(tail.read())
        _say_how_it_ended(client)


def _process(pid: int | None) -> OwnedFd | None:
    """A descriptor that tells the end of a process; None if that cannot be had."""
    with suppress(OSError):
        return None if pid is None else open_pidfd(pid)
    return None


def _say_how_it_ended(client: Client) -> None:
    error = client.session.error
    if isinstance(error, DaemonStopping):
        say_error("the daemon has stopped, so its log ends here")
    elif error is not None:
        say_error("the daemon is gone without a goodbye, so its log ends here")
        sys.exit(1)
