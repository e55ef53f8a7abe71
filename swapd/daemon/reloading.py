"""SIGHUP: reads the settings again, and applies those that can change while the daemon serves.

A thread reads the file, because a disk may hang. The log names settings that need a restart.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from swapd.daemon.inbox import Inbox
from swapd.shared.config import Config, ConfigError, shown
from swapd.shared.limits import LimitError, start

log = logging.getLogger("swapd.daemon.reloading")

#: Rules of decisions: a change of these is a record of the swap log, so that replays follow it.
RULES = ("ack_timeout", "residency_factor", "residency_bound", "patience", "overtake", "turn")
#: Settings that a reload changes. All others are fixed once the device or the page is open.
RELOADED = (*RULES, "stop_timeout", "linger", "swap_log_size", "swap_log_age", "host_memory")


class Reloading:
    """The reloads of one daemon. `read()` is called in a thread; `apply(config)` in the loop."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        apply: Callable[[Config], None],
        inbox: Inbox,
    ) -> None:
        self._config = config
        self._read = read
        self._apply = apply
        self._inbox = inbox
        self._reads = False

    def begin(self) -> None:
        """Read the settings again. A second call during the first becomes part of it."""
        if self._reads:
            return
        self._reads = True
        try:  # a thread of its own: if a disk blocks it for ever, no one waits for it
            start(threading.Thread(target=self._in_thread, name="swapd-reload", daemon=True))
        except LimitError as exc:
            self._done(exc)

    def _in_thread(self) -> None:
        found: Config | Exception
        try:
            found = self._read()
        except Exception as exc:  # noqa: BLE001 - it is raised in the loop, or said there
            found = exc
        with suppress(RuntimeError):  # the loop has ended
            self._inbox.loop.call_soon_threadsafe(self._done, found)

    def _done(self, found: Config | Exception) -> None:
        self._reads = False
        if isinstance(found, Config):
            self._change(found)
        elif isinstance(found, ConfigError | LimitError):
            log.warning("not reloaded, and no setting has changed: %s", found)
        else:
            self._inbox.crashed(found)

    def _change(self, found: Config) -> None:
        old = {name: getattr(self._config, name) for name in Config.__struct_fields__}
        new = {name: value for name in old if (value := getattr(found, name)) != old[name]}
        changed = {name: value for name, value in new.items() if name in RELOADED}
        fixed = {name: value for name, value in new.items() if name not in RELOADED}
        self._config = msgspec.structs.replace(self._config, **changed)
        self._apply(self._config)
        said = _changes(old, changed) or "no setting that can be reloaded differs"
        log.warning("reloaded: %s", said)
        if fixed:
            log.warning("not reloaded, restart swapd for it: %s", _changes(old, fixed))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{name} {shown(name, old[name])} -> {shown(name, new[name])}" for name in new)
