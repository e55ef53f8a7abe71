"""How a stage that is alone joins the next daemon at the same endpoint.

It does so between two calls: as soon as no request is in flight, or after a while. The stage's own
thread joins under the gate's lock, and a new call waits for it. So within one call a stage either
has a daemon or not, except that a daemon may die at any time.
"""

import os
import threading
import time
from pathlib import Path

from swapd.shared.runtime_dir import LIFELINE
from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import NotRunning, SessionEnded, Timeout
from swapd_client.log import log
from swapd_client.session.starting import AGAIN_S
from swapd_client.vllm.stage.components import sizes_of
from swapd_client.vllm.stage.connection import close, connect
from swapd_client.vllm.stage.room import check_others
from swapd_client.vllm.stage.turns import Turns

#: Seconds between two checks for a daemon, and at most between two requests to a daemon that has
#: refused the stage.
LOOK_S = 1.0
LOOK_LAST_S = 60.0


class Refusals:
    def __init__(self, endpoint: Path) -> None:
        self._endpoint = endpoint
        #: Identity of the daemon asked last: inode and time of its socket.
        self._door: tuple[int, int] | None = None
        #: Time to ask again, and the delay before that, in seconds.
        self.ask_at = self._ask_s = 0.0
        self._told: set[type[Exception]] = set()

    def may_ask(self) -> bool:
        """Return whether to try. A daemon that has refused the stage is asked less often."""
        if (door := _door_of(self._endpoint)) is None:
            return False
        if door == self._door:
            return time.monotonic() >= self.ask_at
        self._door = door  # in case it refuses
        self.ask_at, self._ask_s = 0.0, LOOK_S
        self._told.clear()
        return True

    def add(self, error: Exception) -> bool:
        """Return whether to tell of this refusal."""
        self._door = _door_of(self._endpoint)  # the daemon may have come after `may_ask` had looked
        self._ask_s = min(self._ask_s * 2, LOOK_LAST_S)
        self.ask_at = time.monotonic() + self._ask_s
        known = type(error) in self._told
        self._told.add(type(error))
        return not known

    def forget(self) -> None:
        self._door = None


def _door_of(endpoint: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(endpoint / LIFELINE)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns  # ctime changes when the daemon sets its mode


class Rejoining:
    """`look` is for the stage's own thread."""

    def __init__(self, turns: Turns, within_s: float) -> None:
        self._turns = turns
        self._connection = turns.connection
        self._components = turns.components
        self._gate = turns.gate
        self._within_s = within_s
        #: A client of a new daemon, while the stage joins it.
        self._newcomer: Client | None = None
        #: Held by the thread that closes that client: `Client.close` is not thread-safe.
        self._closing = threading.Lock()
        self._refusals = Refusals(self._connection.client.session.endpoint)

    def looks_every_s(self) -> float | None:
        """Return the seconds between two calls of `look`; None: there is a daemon."""
        lost = self._connection.error is not None and self._components.register_again is not None
        if not lost:
            return None
        return AGAIN_S if self._connection.waits else LOOK_S

    def look(self) -> None:
        """Join a daemon if there is one. Blocks until that is done; logs all errors."""
        endpoint = self._connection.client.session.endpoint
        try:
            with self._gate.lock:
                self._await_or_be_alone()
            if self._connection.stopped is not None or not self._refusals.may_ask():
                return
            client = connect(endpoint, self._connection.stage)
        except (NotRunning, SessionEnded, Timeout):
            return
        except Exception as exc:  # noqa: BLE001 - the stage goes on without a daemon
            return self._could_not_join(exc)
        try:
            self._newcomer = client
            self._join(client)
        except Exception as exc:  # noqa: BLE001 - as above
            self._could_not_join(exc)
        finally:
            self._newcomer = None

    def give_up(self) -> None:
        """End the waits of `look`, from another thread."""
        with self._closing:
            if (newcomer := self._newcomer) is not None:
                close(newcomer)
        with self._gate.lock:
            self._gate.open()

    def _await_or_be_alone(self) -> None:
        """While the stage waits for the next daemon, keep calls out, and memory free for it.
        Otherwise go alone now: the memory is the old daemon's."""
        if self._turns.waits() or self._connection.waits_on():
            self._gate.shut = True
            if not self._gate.busy:
                self._turns.leave()
            return
        try:
            if not self._gate.busy:
                self._be_alone()
        finally:
            self._gate.open()

    def _be_alone(self) -> None:
        if (error := self._connection.error) is not None:
            self._turns.go_alone(error)

    def _join(self, client: Client) -> None:
        with self._gate.lock:
            try:
                if self._await_free(client):
                    self._move_to(client)
            except Exception as exc:
                with self._closing:
                    self._connection.leave(client, exc)
                raise
            finally:
                self._gate.open()
                if self._connection.client is not client:
                    with self._closing:
                        client.close()

    def _await_free(self, client: Client) -> bool:
        """Wait until no call runs: between requests, or after a while between two steps.

        Returns False if the stage is closed by then, or the daemon is gone again.
        """
        gate, until = self._gate, time.monotonic() + self._within_s
        while not self._connection.closed.is_set() and client.session.error is None:
            left = until - time.monotonic()
            # not in a change, which may need calls to end
            is_late = left <= 0 and not (gate.changes or self._turns.keeping.whole)
            gate.shut = is_late or self._turns.waits()
            if not gate.busy and (gate.shut or not self._turns.keeping.in_flight):
                return True
            gate.wait(min(left, LOOK_S) if left > 0 else LOOK_S)
        return False

    def _move_to(self, client: Client) -> None:
        if self._turns.waits() or self._connection.left:
            self._turns.leave()
        else:
            self._be_alone()
        self._connection.check(client)
        assert self._components.register_again is not None
        self._components.register_again(client)
        check_others(client.status(), client.session.welcome.session, self._connection.stage)
        self._connection.come_back(client)
        self._refusals.forget()
        session = client.session
        said = ", ".join(f"{name} ({size(n)})" for name, n in sizes_of(session).items())
        log.info("%s is back in swapd at %s: %s", self._connection.stage, session.endpoint, said)

    def _could_not_join(self, error: Exception) -> None:
        if isinstance(error, SessionEnded) or self._connection.closed.is_set():
            return
        if error is self._connection.stopped:
            return log.error("%s", error)
        if self._refusals.add(error):
            goes_on = "its calls wait," if self._turns.waits() else "it goes on without it,"
            log.warning(
                "%s cannot come back to swapd; %s and it tries again: %s",
                self._connection.stage,
                goes_on,
                error,
            )
