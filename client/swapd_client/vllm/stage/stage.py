"""One worker process of a stage: its components in swapd, and the lease that it computes under.

Lives here: connecting, loading, registering, and when the lease is taken and given back. What a
step is, and what it schedules, is said by `worker.py`. Does not import vLLM.

All that a step needs is acquired at once, so that no stage holds a part and waits for the rest. The
lease is kept from step to step, without a message, as `StageKeeping` says.

If the daemon is gone the stage goes on alone, its weights in private memory. It then looks for the
next one at the same endpoint, and comes back between two calls: as soon as no request is in flight,
or after `finish_within_s`. A thread does that under the stage's lock, with nobody in a call, and a
call that begins meanwhile waits for it. So within one call a stage is alone or it is not, except
that a daemon may die at any time.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import Module

import swapd_client
from swapd.shared.runtime_dir import LIFELINE
from swapd.shared.units import seconds, size
from swapd_client.client import Client
from swapd_client.errors import (
    AcquireTimeout,
    ClientClosed,
    NotRunning,
    SessionEnded,
    SwapdError,
)
from swapd_client.lease import Lease
from swapd_client.leases.keeping import StageKeeping
from swapd_client.offload import shortcuts
from swapd_client.vllm import gpus
from swapd_client.vllm.changing import changing
from swapd_client.vllm.options import Options
from swapd_client.vllm.parts import parts_of
from swapd_client.vllm.ranks import Ranks
from swapd_client.vllm.stage import loading
from swapd_client.vllm.stage.components import StageComponents

log = logging.getLogger("swapd_client")

#: A stage that takes no step for so long gives its lease back if it is wanted.
IDLE_S = 0.05


#: How often a stage that is alone looks whether there is a daemon; and at most how rarely it asks
#: one that has refused it.
LOOK_S = 1.0
LOOK_LAST_S = 60.0


class Stopped(SwapdError, RuntimeError):
    """The stage has lost its weights and cannot go on; start it again."""


class Stage:
    """What a worker process has with swapd. Made by `connect`; `close` it.

    Its methods are called by the thread that steps the engine. A thread of its own gives the lease
    back when it is wanted and the engine has stopped stepping.
    """

    def __init__(
        self, client: Client, options: Options, name: str, ranks: Ranks | None = None
    ) -> None:
        self.client = client
        self.name = name
        self._options = options
        self._ranks = ranks
        self.components = StageComponents()
        self._keeping = StageKeeping(options.finish_within_s)
        self._lease: Lease | None = None
        #: What it is on: one of the two.
        self._held: tuple[str, ...] = ()
        #: Streams of a GPU that worked under it.
        self._streams: tuple[int, ...] = ()
        #: How many calls that use weights are under way, one in the other. While there is one the
        #: lease is this thread's; else that of whoever has the lock.
        self._depth = 0
        self._lock = threading.Lock()
        #: Told when a call has ended, or a request, while the stage is alone.
        self._free = threading.Condition(self._lock)
        self._stepping = False
        #: How many changes of the weights are under way; they are no calls, and may have some.
        self._changes = 0
        #: When the turn began, and when the last call ended; seconds.
        self._since = self._rested = time.monotonic()
        #: swapd is gone, and the weights are this process's own.
        self._alone = False
        #: ... or are nowhere: then no step can be made.
        self._stopped: Stopped | None = None
        #: A client of a daemon that has come back, while the stage is to join it.
        self._newcomer: Client | None = None
        #: The stage joins before the next call does anything.
        self._joining = False
        #: The daemon that it could not join, when it asks that again and after how long.
        self._refused_by: tuple[int, int] | None = None
        self._ask_at = self._ask_s = 0.0
        #: Why it could not: each is told once.
        self._told: set[type[Exception]] = set()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._giver = threading.Thread(target=self._give_when_idle, name="swapd-stage", daemon=True)
        self._listen(client)
        self._giver.start()

    def __repr__(self) -> str:
        state = "alone" if self._alone else "held" if self._lease else "not held"
        return f"<Stage {self.name} {state}, {len(self._keeping.in_flight)} requests>"

    @property
    def alone(self) -> bool:
        """Whether the weights are in private memory, since the daemon is gone."""
        return self._alone

    def _listen(self, client: Client) -> None:
        client.session.told.when_wanted(self._wanted.set)
        if self._ranks is not None:
            client.session.told.when_wanted(self._ranks.wake)
        client.session.life.when_ended(self._tell_of_end)

    @classmethod
    def connect(
        cls,
        options: Options,
        name: str,
        *,
        gpu: int | None,
        rank: int = 0,
        share: Callable[[str], Sequence[str]] | None = None,
    ) -> "Stage":
        """Connect to the daemon. `name`: of the stage, in the daemon; of a rank, "thinker.tp1".

        `gpu`: its number in this process, None on a CPU. If the stage has several ranks, this is
        `rank`, and `share` is what `Ranks` needs to meet the others.

        Raises: NotRunning, with the command to run; NoEndpoint, RanksApart, VersionMismatch.
        """
        folder = gpus.folder_of(options.endpoint, gpu, rank)
        ranks = share and Ranks(rank, folder, share, stage=name.partition(".tp")[0])
        if options.faults == "explain":
            swapd_client.explain_faults()
        try:
            client = swapd_client.connect(folder, label=f"{name}:{os.getpid()}")
        except BaseException as exc:
            if ranks is not None:
                ranks.close()
            if isinstance(exc, NotRunning):
                raise NotRunning(f"stage {name!r} cannot start: {exc}") from exc
            raise
        return cls(client, options, name, ranks)

    # --- loading -------------------------------------------------------------------------

    @contextmanager
    def loading(self, nbytes: int | None) -> Iterator[None]:
        """While in it, `nbytes` of device memory are this process's own; 0: nothing.

        More than the daemon can lend, or None, is as much as it can. Blocks until others have given
        way, so stages that start at the same time load one after the other; and at the end until
        swapd has the memory back: vLLM next measures what the GPU has free, and would count it.
        """
        if nbytes == 0:
            yield
            return
        if self._ranks is None:
            lease = loading.workspace(self.client, self.name, nbytes)
        else:
            with self._ranks.acquiring(self._is_wanted, self._give_back):
                self._ranks.waits()
                lease = loading.workspace(self.client, self.name, nbytes)
        with lease:
            yield
        loading.await_return(self.client, self.name, self._closed)

    def take(
        self,
        models: Mapping[str, Module],
        outside: Mapping[str, torch.Tensor] = MappingProxyType({}),
        aliases: Iterable[torch.Tensor] = (),
    ) -> int:
        """Move the weights into swapd; how many bytes were moved.

        `models`: the stage's model under "", and what else it has (a drafter) under its name.
        `outside`, `aliases`: as in `parts_of`. Raises: InvalidSettings, and as `Client.register`;
        then the models are as they were.
        """
        parts = parts_of(models, self._options, self.name, outside, aliases)
        return self.components.register(self.client, parts)

    def take_back(self) -> None:
        """Have all of it in private memory again. Raises as `Client.unregister`."""
        self.components.take_back(self.client)

    # --- steps ---------------------------------------------------------------------------

    def note(self, came: Iterable[str], went: Iterable[str]) -> None:
        """Before a step: requests that are new in it, and those that ended."""
        self._keeping.note(came, went)

    #: Before a step; the lease is held afterwards. `begin_in_full`, in fewer steps.
    begin = shortcuts.begin_step

    def begin_in_full(self, *, encoders: bool = False) -> None:
        """Before a step; the lease is held afterwards. `encoders`: it has encoder inputs.

        Blocks until it is granted. Raises as `Client.acquire`, but for SessionEnded: then the stage
        goes on by itself.
        """
        if not self._stepping:
            self._stepping = True
            self._enter()
        try:
            self._hold(encoders=encoders)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """After a step; the lease is kept, or given back, as `StageKeeping` says."""
        if self._stepping:
            self._stepping = False
            self._leave()

    def rest(self) -> None:
        """After a step that computed nothing."""
        with self._lock:
            lease = self._lease
            if self._alone:
                self._free.notify_all()
            if lease is None or self._depth:
                return
            if not self._keeping.keeps(time.monotonic(), wanted=lease.wanted, computed=False):
                self._give_back()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a call that takes leases of its own: the stage comes back before it, or after."""
        self._enter()
        try:
            self._refuse_stopped()
            yield
        finally:
            self._leave()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Around any other call that touches weights; may be nested, also in a step."""
        self._enter()
        try:
            self._hold(encoders=True)
            yield
        finally:
            self._leave()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While in it the weights may be written to, in memory of this process's own; then swapd
        has the new values, at the addresses the weights had. Not in a step, nor in `using`.

        If it raises, the weights are as they were. Blocks until there is memory for a second copy.
        """
        with self._lock:
            self._await_joined()
            self._changes += 1
            self._give_back()
        try:
            with self._changing():
                yield
        finally:
            with self._lock:
                self._changes -= 1
                self._free.notify_all()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if (error := self.client.session.error) is not None and not self._alone:
            self.go_alone(error)
        if self._alone:
            if self._ranks is not None:  # the others wait for its word as ever
                with self._ranks.acquiring(self._is_wanted, self._give_back):
                    pass
            yield
            return
        parts = self.components
        nbytes = parts.nbytes(self.client)
        with self.loading(nbytes), changing(self.client, parts.tensors, self.go_alone):
            yield

    def close(self) -> None:
        """End the session; the weights become private memory. More than once is once.

        Not on a GPU, which may have no room for them: there nobody may use them afterwards.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._wanted.set()
        if (newcomer := self._newcomer) is not None:
            _close(newcomer)  # what it waits for there ends
        with self._lock:
            self._free.notify_all()
        self._giver.join()
        self._give_back()
        if self._ranks is not None:
            self._ranks.close()
        _close(self.client)

    # --- the lease -----------------------------------------------------------------------

    def _enter(self) -> None:
        with self._lock:  # whoever is just giving the lease back has done so then
            self._await_joined()
            self._depth += 1

    def _leave(self) -> None:
        if self._depth == 1 and self._lease is not None:
            session = self.client.session
            if session.processor.works_late:
                self._streams = session.leases.current_streams()
            if self._held is not self.components.main and not self._try(self.components.main):
                self._give_back()  # else the encoders could not go
            wanted = bool(session.told.wanted) and self._is_wanted()
            if not self._keeping.keeps(time.monotonic(), wanted=wanted):
                self._give_back()
            elif wanted:
                self._wanted.set()  # that it was has been seen; that nothing follows may not be
        with self._lock:
            self._depth -= 1
            self._rested = time.monotonic()
            if self._alone:
                self._free.notify_all()

    def _hold(self, *, encoders: bool) -> None:
        names = self.components.all if encoders else self.components.main
        if self._ranks is None or self._depth > 1:  # no rank lets go in the middle of a step
            self._take(names)
        else:
            with self._ranks.acquiring(self._is_wanted, self._give_back):
                self._take(names)

    def _take(self, names: tuple[str, ...]) -> None:
        """Hold `names`, or more, whatever is held; nothing if the stage is alone."""
        session = self.client.session
        if session.error is not None:
            self._refuse_stopped()
            if not self._alone:
                self.go_alone(session.error)
            return
        if session.told.wanted and self._depth == 1:
            self._give_way_between_steps()
        if (
            self._lease is not None
            and names is self.components.all
            and self._held is not self.components.all
        ):
            if self._try(names):
                return
            self._give_back()
        if self._lease is None:
            self._acquire(names)

    def _give_way_between_steps(self) -> None:
        wanted = self._is_wanted()
        if wanted and not self._keeping.keeps(time.monotonic(), wanted=wanted):
            self._give_back()

    def _acquire(self, names: tuple[str, ...]) -> None:
        if self._ranks is not None:
            self._ranks.waits()
        try:
            self._lease = self.client.acquire(*names)
        except (SessionEnded, ClientClosed) as exc:
            self.go_alone(exc)
            return
        self._held = names
        if self._lease.loaded:
            self._since = time.monotonic()
            log.info("%s is in, after %s", " + ".join(names), seconds(self._lease.waited_s))

    def _try(self, names: tuple[str, ...]) -> bool:
        """Hold `names` instead of what is held, if that needs no wait."""
        held = self._lease
        try:
            self._lease = self.client.acquire(*names, timeout=0)
        except (AcquireTimeout, SessionEnded):
            return False
        self._held = names
        if held is not None:
            held.release()
        return True

    def _is_wanted(self) -> bool:
        return self._lease is not None and self._lease.wanted

    def _give_back(self) -> None:
        """The lease ends when the GPU has done what it was asked under it. From any thread."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if lease.wanted:
            now = time.monotonic()
            requests, spent = self._keeping.over(), seconds(now - self._since)
            log.info("%s gives way after %s, %s", self.name, _counted(requests), spent)
        for stream in self._streams:
            lease.uses(stream)
        with suppress(SessionEnded):  # the next acquire says so
            lease.release()

    def _give_when_idle(self) -> None:
        """Give the lease back once it is wanted and nothing has used it for a while.

        While the daemon is gone there is no lease: then look for the next one.
        """
        while not self._closed.is_set():
            lost = (
                self.components.register_again is not None and self.client.session.error is not None
            )
            self._wanted.wait(LOOK_S if lost else None)
            self._wanted.clear()
            if lost:
                self._look()
            while self._is_wanted() and not self._closed.is_set():
                with self._lock:
                    left = IDLE_S if self._depth else self._rested + IDLE_S - time.monotonic()
                    if left <= 0:
                        self._give_back()
                self._closed.wait(max(left, 0.0))

    # --- the daemon is gone --------------------------------------------------------------

    def _tell_of_end(self, error: SwapdError) -> None:
        if isinstance(error, SessionEnded):
            log.error("%s has lost swapd: %s", self.name, error)
        self._wanted.set()

    def go_alone(self, error: SwapdError) -> None:
        """Have the weights in private memory, and take no turns until swapd is back.

        In a call, or under the lock. Raises: Stopped if there is no memory for them.
        """
        self._alone = True
        self._lease = None
        self._wanted.set()
        self._leave_to_itself(self.client, error)
        log.error(
            "%s goes on without swapd, its weights in private memory: it gives way to nobody until "
            "swapd is back. Start it again, and this stage comes back by itself",
            self.name,
        )

    def _refuse_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _leave_to_itself(self, client: Client, error: Exception) -> None:
        """Close a client; what it had is in private memory. Raises: Stopped."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                client.close()
        except RuntimeWarning as exc:
            self._stopped = Stopped(
                f"stage {self.name!r} has lost swapd ({error}), and there is no memory for its "
                "weights without it. Start swapd again, then the stage"
            )
            raise self._stopped from exc

    # --- and back again ------------------------------------------------------------------

    def _look(self) -> None:
        """Join a daemon if there is one. In the stage's own thread; whatever fails is told."""
        lost = self.client.session
        try:
            with self._lock:  # now rather than in the next call: the memory is the old daemon's
                if not (self._depth or self._changes):
                    self._be_alone()
            if self._stopped is not None or not self._may_ask(lost.endpoint):
                return
            client = swapd_client.connect(lost.endpoint, label=f"{self.name}:{os.getpid()}")
        except (NotRunning, SessionEnded):
            return
        except Exception as exc:  # noqa: BLE001 - the stage goes on all the same
            return self._could_not_join(exc)
        try:
            self._newcomer = client
            with self._lock:
                self._join(client)
        except Exception as exc:  # noqa: BLE001 - as above
            self._could_not_join(exc)
        finally:
            self._newcomer = None

    def _be_alone(self) -> None:
        """Not in a call. Under the lock, when the daemon is known to be gone."""
        error = self.client.session.error
        if error is not None and not self._alone:
            self.go_alone(error)

    def _join(self, client: Client) -> None:
        """Between two calls, have all of it with this client. Under the lock."""
        try:
            if self._await_free(client):
                self._be_alone()
                assert self.components.register_again is not None
                _check_same_device(self.client, client)
                if self._ranks is not None:
                    self._ranks.check_place()
                self.components.register_again(client)
                self._listen(client)
                self.client, self._alone = client, False
                self._refused_by = None
                there = client.session.components.values()
                said = ", ".join(f"{one.name} ({size(one.nbytes)})" for one in there)
                log.info("%s is back in swapd at %s: %s", self.name, client.session.endpoint, said)
        except Exception as exc:
            self._leave_to_itself(client, exc)
            raise
        finally:
            self._joining = False
            self._free.notify_all()
            if self.client is not client:
                client.close()

    def _await_free(self, client: Client) -> bool:
        """Until nobody is in a call: between requests, or after a while between two steps.

        False if the stage is closed by then, or the daemon is gone again.
        """
        until = time.monotonic() + self._options.finish_within_s
        while not self._closed.is_set() and client.session.error is None:
            left = until - time.monotonic()
            # not in a change, which may take calls to end
            self._joining = left <= 0 and not self._changes
            busy = self._depth or self._changes
            if not busy and (self._joining or not self._keeping.in_flight):
                return True
            self._free.wait(min(left, LOOK_S) if left > 0 else LOOK_S)
        return False

    def _await_joined(self) -> None:
        """Before a call. Under the lock."""
        while self._joining and not self._depth:
            self._free.wait()

    def _may_ask(self, endpoint: Path) -> bool:
        """Whether there may be a daemon; one that has refused the stage is not asked every time."""
        try:
            door = os.stat(endpoint / LIFELINE)
        except OSError:
            return False
        there = door.st_ino, door.st_ctime_ns
        if there == self._refused_by:
            return time.monotonic() >= self._ask_at
        self._refused_by = there  # if it does
        self._ask_at, self._ask_s = 0.0, LOOK_S
        self._told.clear()
        return True

    def _could_not_join(self, error: Exception) -> None:
        if isinstance(error, SessionEnded) or self._closed.is_set():
            return
        if error is self._stopped:
            return log.error("%s", error)
        self._ask_s = min(self._ask_s * 2, LOOK_LAST_S)
        self._ask_at = time.monotonic() + self._ask_s
        if type(error) not in self._told:
            self._told.add(type(error))
            log.warning(
                "%s cannot come back to swapd, goes on without it, and tries again: %s",
                self.name,
                error,
            )


def _check_same_device(old: Client, new: Client) -> None:
    """Raise unless both have the weights in the same memory."""
    before, now = old.session.welcome, new.session.welcome
    if (before.uuid, before.device) != (now.uuid, now.device):
        raise NotRunning(
            f"swapd at {new.session.endpoint} serves {now.device}, and the weights are on "
            f"{before.device}: start one for that"
        )


def _close(client: Client) -> None:
    """Nothing is to run here any more: weights are kept only where that costs nothing."""
    client.close(keep=not client.session.processor.memory_is_scarce)


def _counted(requests: int) -> str:
    return f"{requests} request" + "s" * (requests != 1)
