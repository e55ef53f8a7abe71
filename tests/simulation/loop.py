"""An event loop on a virtual clock, and threads that run only when it says so: one seed, one order.

Time stands still while code runs, and goes on to the next timer when none is left to run. Of the
descriptors that the kernel reports as ready, the seed chooses which are served, and in what order.
"""

import _thread
import asyncio
import select
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

#: Seconds that pass in each turn of the loop; a seed that needs more turns never ends.
TURN_S, TURNS_MAX = 2e-5, 300_000


class Stuck(Exception):
    """Nothing will ever happen any more, or the loop turns for ever."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """`lazy`: the chance that a ready descriptor waits for another turn."""

    def __init__(self, rng: Random, lazy: float) -> None:
        super().__init__()
        self.rng = rng
        self.strands: list[Strand] = []
        self._lazy = lazy
        self._now, self._turns, self._came = 1000.0, 0, 0
        self._poll = select.poll()
        #: By descriptor: in which order it came, and who reads and writes it.
        self._watched: dict[int, tuple[int, dict[int, asyncio.Handle]]] = {}
        self._selector = self

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """The machine was suspended."""
        self._now += seconds

    def close(self) -> None:
        for strand in self.strands:
            strand.kill()
        super().close()

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """In place of a selector's."""
        self._now += TURN_S
        self._turns += 1
        found = sorted((self._watched[fd], said) for fd, said in self._poll.poll(0))
        ready = [
            handle
            for (_, ways), said in found
            for way, handle in ways.items()
            if said & (way | select.POLLHUP | select.POLLERR)
        ]
        chosen = [one for one in ready if self.rng.random() >= self._lazy]
        self.rng.shuffle(chosen)
        if self._turns > TURNS_MAX or not (chosen or ready or timeout is not None):
            raise Stuck("the loop turns for ever, or nothing is left to happen")
        if not chosen and timeout != 0:
            if ready and (timeout is None or self.rng.random() < 0.5):
                return [self.rng.choice(ready)]
            assert timeout is not None
            self._now += min(timeout, self.rng.random() * 0.01) if ready else timeout
        return chosen

    def _process_events(self, chosen: list[asyncio.Handle]) -> None:
        self._ready.extend(chosen)  # type: ignore[attr-defined]

    def _write_to_self(self) -> None:
        """The loop does not sleep while a strand runs."""

    def _watch(self, fd: int, way: int, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if fd not in self._watched:
            self._came += 1
            self._watched[fd] = self._came, {}
        ways = self._watched[fd][1]
        ways[way] = asyncio.Handle(call, args, self, None)
        self._poll.register(fd, sum(ways))

    def _forget(self, fd: int, way: int) -> bool:
        ways = self._watched.get(fd, (0, {}))[1]
        if (handle := ways.pop(way, None)) is None:
            return False
        handle.cancel()
        if ways:
            self._poll.modify(fd, sum(ways))
        else:
            del self._watched[fd]
            self._poll.unregister(fd)
        return True

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._watch(fd, select.POLLIN, callback, args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._watch(fd, select.POLLOUT, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        return self._forget(fd, select.POLLIN)

    def remove_writer(self, fd: Any) -> bool:
        return self._forget(fd, select.POLLOUT)

    def add_signal_handler(self, *_: Any) -> None:  # type: ignore[override]
        """No signal comes."""


class _Killed(BaseException):
    pass


class Strand:
    """A thread of the daemon. It and the loop pass a baton: it runs when the loop resumes it, until
    it pauses or ends."""

    current: "Strand | None" = None

    def __init__(self, loop: SimulatedLoop, run: Callable[[], object]) -> None:
        self.loop, self._run = loop, run
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._killed = self.ended = False
        self._error: BaseException | None = None
        loop.strands.append(self)
        _thread.start_new_thread(self._live, ())
        loop.call_soon(self.resume)

    def _live(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._run()
        except _Killed:
            pass
        except BaseException as exc:  # noqa: BLE001 - raised in the loop
            self._error = exc
        self.ended = True
        self._back.release()

    def resume(self) -> None:
        """Run it until it pauses; raise the error that has ended it."""
        if not self.ended:
            Strand.current = self
            self._go.release()
            self._back.acquire()
            Strand.current = None
            if self._error is not None:
                raise self._error

    def kill(self) -> None:
        self._killed = True
        while not self.ended:
            self.resume()

    def park(self) -> None:
        """In the strand: pause until somebody resumes it."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise _Killed


def pause(seconds: float) -> None:
    """In a strand: time goes on."""
    if (strand := Strand.current) is not None:
        strand.loop.call_later(seconds, strand.resume)
        strand.park()


class Signal:
    """In place of a `Condition`: only one runs at a time anyway."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._parked: list[Strand] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify(self) -> None:
        for strand in self._parked:
            self._loop.call_later(self._loop.rng.random() * 0.002, strand.resume)
        self._parked.clear()

    notify_all = notify

    def wait_for(self, met: Callable[[], object]) -> None:
        while not met():
            assert Strand.current is not None, "the loop waits"
            self._parked.append(Strand.current)
            Strand.current.park()


class Steps(deque[Any]):
    """In place of a `SimpleQueue` that one strand reads."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._signal = Signal(loop)

    def put(self, item: Any) -> None:
        self.append(item)
        self._signal.notify()

    def get(self) -> Any:
        self._signal.wait_for(lambda: self)
        return self.popleft()


class Pool:
    """In place of `Threads`: each job happens at one moment, `count` of them wait for theirs."""

    def __init__(self, loop: SimulatedLoop, count: int) -> None:
        self._loop, self._free = loop, count
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.pool = self  # type: ignore[attr-defined]
        self._jobs.append((future, lambda: call(*args, **kwargs)))
        self._begin()
        return future

    def _begin(self) -> None:
        if self._free and self._jobs:
            self._free -= 1
            self._loop.call_later(self._loop.rng.choice((0, 1e-4, 0.003, 0.1)), self._do)

    def _do(self) -> None:
        future, call = self._jobs.popleft() if self._jobs else (Future[Any](), None)
        if call is not None and future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as exc:  # noqa: BLE001 - it is whose job it was
                future.set_exception(exc)
        self._free += 1
        self._begin()

    async def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    @staticmethod
    def wait(futures: list[Future[Any]]) -> None:
        """In place of `concurrent.futures.wait`: do all up to these now."""
        for future in futures:
            while not future.done():
                future.pool._free -= 1  # type: ignore[attr-defined]
                future.pool._do()  # type: ignore[attr-defined]
