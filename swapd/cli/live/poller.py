"""Polls one daemon for a live view, in its own thread: its status, and its last records.

It waits for a daemon that is gone.
"""

import threading
import time
from pathlib import Path

import swapd_client
from swapd.cli.conclusions import report
from swapd.cli.last_lines import LastLines
from swapd.cli.live.screen import Snapshot
from swapd.cli.target import OWN_LABEL
from swapd.shared.runtime_dir import RuntimeDirError
from swapd_client import Client
from swapd_client.errors import NotRunning, SwapdError, Timeout

LABEL = f"{OWN_LABEL}top"
LINES_MAX = 200
#: Seconds between two requests for the status, and between two attempts to connect.
POLL_S = 0.5


class Poller:
    """`view` is up to date from `start` to `close`; each is a new object."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.view: Snapshot
        #: None while no daemon is there.
        self.client: Client | None = None
        self._folder, self._timeout = folder, timeout
        self._lines: LastLines | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swapd-top", daemon=True)

    def start(self) -> None:
        """Connect, then poll. Raises: SwapdError, OSError if no daemon is there at the start."""
        self._connect()
        self._thread.start()

    def close(self, within_s: float | None = None) -> None:
        """End the thread and the connection. Blocks until a pending answer came, or for `within_s`:
        then the end of the process ends them."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                if self.client is None:
                    self._connect()
                else:
                    self._poll(self.client)
            except Timeout as exc:
                self._say(str(exc))
            except (NotRunning, RuntimeDirError, OSError):
                self._disconnect("the daemon is gone; waiting for it to come back")
            except SwapdError as exc:
                gone = self.client is not None and self.client.session.error is not None
                why = "the daemon is gone; waiting for it to come back" if gone else str(exc)
                self._disconnect(why)
        self._disconnect("")

    def _connect(self) -> None:
        client = swapd_client.connect(self._folder, label=LABEL, timeout=self._timeout, reconnect=0)
        try:
            self._poll(client)
        except BaseException:
            client.close()
            raise
        self.client = client

    def _poll(self, client: Client) -> None:
        status = report(client.status(timeout=self._timeout))
        at = time.monotonic()
        if self._lines is None:
            self._lines = LastLines(Path(status.swap_log), LINES_MAX)
        self._lines.read(status.sessions)
        self.view = Snapshot(status, tuple(self._lines.lines), at)

    def _disconnect(self, why: str) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        self._say(why)

    def _say(self, amiss: str) -> None:
        if self.view.amiss != amiss:
            self.view = self.view._replace(amiss=amiss)
