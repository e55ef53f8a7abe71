"""A worker with threads: `worker.py ENDPOINT FOLDER NAME SEED`; runs until its stdin ends."""

import faulthandler
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from benchmarks.chaos.book import Book, Part
from benchmarks.chaos.counts import Counts
from benchmarks.processes import MIB, until_stdin_ends
from swapd_client import (
    Client,
    DaemonGone,
    Deadlock,
    InUse,
    NotRunning,
    SessionEnded,
    SwapdError,
    Timeout,
    connect,
)

#: Seconds; longest allowed wait, even with kills and stops.
PATIENCE_S = 60.0
THREADS = 2
#: Seconds between two checks for a new daemon.
LOOK_S = 0.05


class Worker:
    """One session after the other, as long as there are daemons."""

    #: How long its client waits for the next daemon.
    reconnect_s = 0.0

    def __init__(self, endpoint: Path, folder: Path, name: str, seed: int) -> None:
        self.endpoint, self.folder, self.name = endpoint, folder, name
        self.random = random.Random(seed)
        self.counts = Counts(folder, name)
        self.enough = until_stdin_ends()
        self.book = Book(name)

    def run(self) -> None:
        while not self.enough.is_set():
            try:
                client = connect(self.endpoint, label=self.name, reconnect=self.reconnect_s)
            except (NotRunning, SessionEnded, Timeout):
                self.enough.wait(LOOK_S)
                continue
            except SwapdError as exc:
                self.counts.unexpected(exc)
                return
            self._one_session(client)

    def judge(self, ended: SwapdError | None, error: SwapdError) -> None:
        """Count an error as a fault, unless the daemon was killed, or told to stop."""
        if isinstance(ended or error, DaemonGone):
            self.counts.add("daemons lost")
            return
        self.enough.set()
        if isinstance(error, Timeout):
            self.counts.fault("endless", str(error))
        else:
            self.counts.unexpected(error)

    def check_private(self) -> None:
        """Check that components are private memory again."""
        if wrong := self.book.wrong():
            self.counts.fault("wrong bytes", f"after the session: {wrong}")
        self.counts.add("checks", len(self.book.parts))

    def _one_session(self, client: Client) -> None:
        self.counts.add("sessions")
        self.book = Book(self.name)
        try:
            self._register(client)
        except SwapdError as exc:
            self.judge(client.session.error, exc)
        else:
            threads = [
                threading.Thread(target=self._work, args=(client, self.random.random()))
                for _ in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        client.close()
        self.check_private()

    def _register(self, client: Client) -> None:
        book = self.book
        for part in book.singles:
            made = client.register(
                part.name,
                part.buffers(0),
                mutable=part.mutable,
                segments=[[str(i)] for i in range(len(part.segments))],
            )
            part.views = {str(i): made.view(str(i)) for i in range(len(part.segments))}
        family = client.register_family(book.family, book.family_buffers())
        for part, made in zip(book.blocks, family, strict=True):
            part.views = {"0": made.view("0")}

    # --- a thread ------------------------------------------------------------------------

    def _work(self, client: Client, seed: float) -> None:
        rng = random.Random(seed)
        weights = {
            self._use: 8,
            self._use_two: 4,
            self._use_family: 4,
            self._use_in_segments: 4,
            self._exchange: 4,
            self._write: 6,
            self._update: 1,
            self._workspace: 2,
            self._give_up: 3,
            self._nest: 2,
            self._look: 1,
            self._register_again: 1,
            self._share: 1,
        }
        jobs = list(weights)
        try:
            while not self.enough.is_set():
                rng.choices(jobs, list(weights.values()))[0](client, rng)
        except SwapdError as exc:
            self.judge(client.session.error, exc)
        except BaseException as exc:
            self.counts.unexpected(exc)
            self.enough.set()
            raise

    def check(self, part: Part, since: int, segment: int | None = None) -> None:
        self.counts.add("checks")
        self.counts.add("MiB checked", max(part.nbytes // MIB, 1))
        if not part.is_right(segment, since):
            self.counts.fault("wrong bytes", f"{part.name}, segment {segment}, since {since}")

    def _hold(self, client: Client, *parts: Part, **options: object) -> None:
        since = [part.version for part in parts]
        with client.acquire(*[p.name for p in parts], timeout=PATIENCE_S, **options):  # type: ignore[arg-type]
            self.counts.add("acquires")
            for part, version in zip(parts, since, strict=True):
                with part.lock if part.mutable else nullcontext():
                    self.check(part, part.version if part.mutable else version)

    def _use(self, client: Client, rng: random.Random) -> None:
        part = rng.choice(self.book.singles)
        for _ in range(rng.choice((1, 1, 5))):
            how = {"priority": rng.choice((0, 0, 0, 1)), "deadline": rng.choice((None, None, 5.0))}
            self._hold(client, part, **how)

    def _use_two(self, client: Client, rng: random.Random) -> None:
        self._hold(client, *rng.sample(self.book.singles, 2))

    def _use_family(self, client: Client, rng: random.Random) -> None:
        with client.acquire(self.book.family, timeout=PATIENCE_S):
            self.counts.add("families")
            for part in self.book.blocks:
                self.check(part, part.version)
        self._hold(client, rng.choice(self.book.blocks))

    def _use_in_segments(self, client: Client, rng: random.Random) -> None:
        part = self.book.long
        with client.acquire(part.name, timeout=PATIENCE_S, early=True) as lease:
            self.counts.add("in segments")
            for i in range(len(part.segments)):
                lease.wait(i)
                self.check(part, part.version, i)

    def _exchange(self, client: Client, rng: random.Random) -> None:
        """One part after the other comes in, each in the place of the last."""
        first, *others = rng.sample(self.book.blocks, len(self.book.blocks))
        lease = client.acquire(first.name, timeout=PATIENCE_S, early=True)
        try:
            for part in others:
                lease = client.leasing.exchange(lease, part.name)
                lease.wait()
                self.check(part, part.version)
                self.counts.add("exchanges")
        finally:
            lease.release()

    def _write(self, client: Client, rng: random.Random) -> None:
        part = self.book.mutable
        with client.acquire(part.name, timeout=PATIENCE_S), part.lock:
            self.check(part, part.version)
            part.write()
        self.counts.add("writes")

    def _update(self, client: Client, rng: random.Random) -> None:
        part = self.book.clean
        if not part.lock.acquire(blocking=False):
            return
        try:
            part.coming = part.version + 1
            client.update(part.name, part.buffers(part.coming))
            part.version = part.coming
            self.counts.add("updates")
        finally:
            part.lock.release()

    def _workspace(self, client: Client, rng: random.Random) -> None:
        client.acquire_workspace(rng.choice((1, 4 * MIB)), timeout=PATIENCE_S).release()
        self.counts.add("workspaces")

    def _give_up(self, client: Client, rng: random.Random) -> None:
        part = rng.choice(self.book.parts)
        with suppress(Timeout):
            client.acquire(part.name, timeout=rng.choice((0, 0.001, 0.01))).release()
        self.counts.add("cancelled")

    def _nest(self, client: Client, rng: random.Random) -> None:
        outer, inner = rng.sample(self.book.singles, 2)
        with client.acquire(outer.name, timeout=PATIENCE_S), suppress(Deadlock):
            self._hold(client, inner)

    def _look(self, client: Client, rng: random.Random) -> None:
        client.prefetch(rng.choice(self.book.parts).name)
        first, second = rng.sample(self.book.parts, 2)
        client.follows(first.name, after=second.name)
        client.forecast(self.book.family)
        client.resize(self.book.family, rng.choice((None, 0, MIB, "5MiB")))
        assert self.name in {s.label for s in client.status().sessions}

    def _register_again(self, client: Client, rng: random.Random) -> None:
        part = Part(self._name_here(), (MIB,))
        part.views["0"] = client.register(part.name, part.buffers(0)).view("0")
        self._hold(client, part)
        client.unregister(part.name)
        self.check(part, 0)
        self.counts.add("registered again")

    def _share(self, client: Client, rng: random.Random) -> None:
        """Load the file that others load, too; they share the memory."""
        from benchmarks.chaos import shared

        name = self._name_here()
        told: list[int] = []  # nothing is told of a file that is not read
        loaded = client.load(
            name, shared.file(self.folder), progress=lambda done, _: told.append(done)
        )
        for _ in range(3):
            with client.acquire(name, timeout=PATIENCE_S):
                if not shared.is_right(loaded.tensors):
                    self.counts.fault("wrong bytes", name)
        with suppress(InUse):
            client.unregister(name)
        self.counts.add("shared loads")
        self.counts.add("of these, files read", bool(told))

    def _name_here(self) -> str:
        """Of the one component that a thread registers for itself."""
        return f"{self.name}.{threading.get_ident()}"


def main(make: Callable[[Path, Path, str, int], Worker] = Worker) -> None:
    faulthandler.register(signal.SIGUSR1)  # all threads' stacks, if it does not end
    endpoint, folder, name, seed = sys.argv[1:]
    make(Path(endpoint), Path(folder), name, int(seed)).run()


if __name__ == "__main__":
    main()
