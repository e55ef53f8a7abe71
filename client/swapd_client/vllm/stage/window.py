"""Streams layers that do not fit: each is loaded ahead of its own forward, and leaves after it.

A turn holds everything else, and a *window* of a few parts of such layers. After a layer's forward
its part is exchanged for the next one, in one message: so the window's room is never anybody else's
during the turn. The parts come in a circle, so the first layers of the next step are loaded during
the last ones of this one.

The engine's thread only waits for parts and marks them as used. A thread of the window makes the
exchanges while the next layer computes.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.nn import Module

from swapd_client.client import Client
from swapd_client.errors import ClientClosed, SessionEnded, SessionFenced, SwapdError
from swapd_client.lease import Lease, wait_here


class Window:
    """Without `use` nothing passes through it."""

    def __init__(self, go_alone: Callable[[SwapdError], None]) -> None:
        """`go_alone`: called in a call when the daemon is gone; then all weights are in memory."""
        self._go_alone = go_alone
        #: The parts in the order of use, and those that a turn begins with.
        self._parts: tuple[str, ...] = ()
        self.first: tuple[str, ...] = ()
        #: Why an exchange failed: then no further computation is possible in this turn.
        self.error: BaseException | None = None
        #: The layer around each module, and the number of each layer's part.
        self._layer_of: dict[int, Module] = {}
        self._number_of: dict[int, int] = {}
        self._client: Client | None = None
        #: Guards the rest.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Whether a turn is under way; whether the thread is making an exchange.
        self._on = self._exchanging = False
        self._closed = False
        #: The leases of the parts that are in, or on their way; of those, the parts that compute,
        #: and those that have been used, the oldest first.
        self._in: dict[int, Lease] = {}
        self._computing: Counter[int] = Counter()
        self._used: deque[int] = deque()
        #: The part to load next; and one that the engine waits for out of order.
        self._next = 0
        self._needed: int | None = None

    def use(self, parts: Mapping[str, Sequence[Module]], slots: int) -> None:
        """Stream `parts`, `slots` of them at a time: layers by part, in the order of use."""
        self._parts, self.first = tuple(parts), tuple(parts)[:slots]
        for number, layers in enumerate(parts.values()):
            for layer in layers:
                _surround(layer, self, number)
                self._number_of[id(layer)] = number
                self._layer_of.update((id(module), layer) for module in layer.modules())
        threading.Thread(target=self._run, name="swapd-window", daemon=True).start()

    def is_wanted(self) -> bool:
        """In any thread."""
        if not self._on or self._client is None:
            return False
        return not self._client.session.told.wanted.isdisjoint(self._parts)

    # --- turns ---------------------------------------------------------------------------

    def begin(self, client: Client, names: tuple[str, ...], whole: Lease, *, early: bool) -> Lease:
        """Begin a turn in the engine's thread. `whole`: a lease of `names` and `first`.

        Returns a lease of `names` alone; `whole` is released. Raises as `Client.acquire`.
        """
        if not self._parts:
            return whole
        with self._lock:
            self._computing.clear()
            self._used.clear()
            self._next, self._needed, self.error = len(self.first), None, None
            self._client = client
        try:
            with whole:
                for number, name in enumerate(self.first):
                    self._in[number] = lease = client.acquire(name, early=True)
                    lease.answered_for()
                turn = client.acquire(*names, early=early)
        except BaseException:
            self.end()
            raise
        self._on = True
        return turn

    def end(self) -> None:
        """End the turn. Blocks until an exchange that is under way has been answered."""
        with self._lock:
            self._on = False
            self._changed.wait_for(lambda: not self._exchanging)
            leases = list(self._in.values())
            self._in.clear()
        for lease in leases:
            with suppress(SwapdError):  # the session has ended, and its leases with it
                lease.release()

    def close(self) -> None:
        self.end()
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    # --- in the engine's thread ----------------------------------------------------------

    def need(self, number: int) -> None:
        """Wait until the part of a layer is loaded, before its forward; on a GPU the stream waits.

        No-op outside of turns: then the weights are in memory. Raises as `Client.acquire`, but goes
        alone if the session ended without a fence.
        """
        try:
            lease = self._await(number)
            if lease is not None:
                wait_here(lease)
        except (SessionEnded, ClientClosed) as exc:
            if isinstance(exc, SessionFenced):
                raise
            self._go_alone(exc)

    def _await(self, number: int) -> Lease | None:
        with self._lock:
            if not self._on:
                return None
            if number in self._used:
                self._used.remove(number)
            if number not in self._in:
                self._needed = number
                self._changed.notify_all()
                self._changed.wait_for(lambda: number in self._in or self.error or not self._on)
                self._needed = None
                if self.error is not None:
                    raise self.error
            self._computing[number] += 1
            return self._in.get(number)

    def done(self, number: int) -> None:
        with self._lock:
            self._computing[number] -= 1
            lease = self._in.get(number)
            if lease is None or self._computing[number] > 0:
                return
            lease.rests()
            self._used.append(number)
            self._changed.notify_all()

    def layer_of(self, module: Module) -> Module | None:
        return self._layer_of.get(id(module))

    @contextmanager
    def holding(self, layer: Module | None) -> Iterator[None]:
        if layer is None:
            yield
            return
        number = self._number_of[id(layer)]
        self.need(number)
        try:
            yield
        finally:
            self.done(number)

    # --- in its own thread ---------------------------------------------------------------

    def _run(self) -> None:
        while (exchange := self._await_work()) is not None:
            client, old, number = exchange
            new, error = None, None
            try:
                new = client.leasing.exchange(old, self._parts[number])
                new.answered_for()
            except BaseException as exc:  # noqa: BLE001 - the engine's thread raises it
                error = exc
            with self._lock:
                self._exchanging, self.error = False, error
                if new is not None:
                    self._in[number] = new
                self._changed.notify_all()

    def _await_work(self) -> tuple[Client, Lease, int] | None:
        with self._lock:
            self._changed.wait_for(lambda: self._closed or self._has_work())
            if self._closed:
                return None
            if self._needed is not None and self._needed not in self._in:
                number, old = self._needed, self._superfluous(self._needed)
            else:
                number, old = self._next, self._used.popleft()
            while number in self._in:  # it was needed out of order
                number = (number + 1) % len(self._parts)
            self._next = (number + 1) % len(self._parts)
            self._exchanging = True
            assert self._client is not None
            return self._client, self._in.pop(old), number

    def _has_work(self) -> bool:
        if not self._on or self.error is not None:
            return False
        if self._needed is not None and self._needed not in self._in:
            return any(not self._computing[number] for number in self._in)
        return bool(self._used)

    def _superfluous(self, needed: int) -> int:
        if self._used:
            return self._used.popleft()
        idle = [number for number in self._in if not self._computing[number]]
        return max(idle, key=lambda number: (number - needed) % len(self._parts))


def _surround(layer: Module, window: Window, number: int) -> None:
    """Make a layer's forward need its part. A hook would cost more."""
    forward = layer.forward

    def passes(*args: Any, **kwargs: Any) -> Any:
        window.need(number)
        try:
            return forward(*args, **kwargs)
        finally:
            window.done(number)

    layer.__dict__["forward"] = passes  # setattr would first check for parameters
