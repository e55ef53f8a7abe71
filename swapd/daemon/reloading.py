"""SIGHUP: reads the settings again, and applies those that can change while the daemon serves.

A thread reads the file, because a disk may hang. The log names settings that need a restart.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from swapd.shared.config import Config, ConfigError
from swapd.shared.limits import LimitError, start
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.reloading")

#: Rules of decisions: a change of these is a record of the swap log, so that replays follow it.
RULES = ("ack_timeout", "residency_factor", "residency_bound", "patience")
#: Settings that a reload changes. All others are fixed once the device or the page is open.
RELOADED = (*RULES, "stop_timeout", "linger", "swap_log_size", "swap_log_age", "host_memory")


class Reloading:
    """The reloads of one daemon. `read()` is called in a thread; `apply(config)` in the loop."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        loop: asyncio.AbstractEventLoop,
        apply: Callable[[Config], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._read = read
        self._loop = loop
        self._apply = apply
        self._crashed = crashed
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
            self._loop.call_soon_threadsafe(self._done, found)

    def _done(self, found: Config | Exception) -> None:
        self._reads = False
        if isinstance(found, Config):
            self._change(found)
        elif isinstance(found, ConfigError | LimitError):
            log.warning("not reloaded, and no setting has changed: %s", found)
        else:
            self._crashed(found)

    def _change(self, found: Config) -> None:
        differ = {
            name: (old, new)
            for name in Config.__struct_fields__
            if (old := getattr(self._config, name)) != (new := getattr(found, name))
        }
        fixed = [name for name in differ if name not in RELOADED]
        changed = {name: new for name, (_, new) in differ.items() if name in RELOADED}
        self._config = msgspec.structs.replace(self._config, **changed)
        self._apply(self._config)
        said = ", ".join(f"{n} {_shown(*differ[n])}" for n in changed)
        log.warning("reloaded: %s", said or "no setting that can be reloaded differs")
        if fixed:
            said = ", ".join(f"{n} {_shown(*differ[n])}" for n in fixed)
            log.warning("not reloaded, restart swapd for it: %s", said)


def _shown(*values: Any) -> str:
    return " -> ".join(
        "default" if v is None else size(v) if isinstance(v, int) else str(v) for v in values
    )
