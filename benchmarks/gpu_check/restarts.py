"""Daemons that are replaced, killed and followed by another, while workers keep their models.

The daemon is `swapd serve` itself, in a folder that outlives it.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.deaths import LAYERS, closes_in_place, computes_and_replays
from benchmarks.gpu_check.rig import Worker, chunks_of, comes_true, registered, room_for, workers
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings
from benchmarks.processes import Daemon
from swapd_client import connect

#: Seconds for which a worker waits for the next daemon.
RECONNECT_S = 30.0


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    with check.part("the program of a daemon is replaced", guarantee=True):
        _upgrade(check, settings, nbytes)
    with check.part("a daemon follows one that was killed", guarantee=True):
        _next_daemon(check, settings, nbytes)
    with check.part("host copies outlive a killed daemon", guarantee=True):
        _keeper(check, settings, nbytes)
    with check.part("a daemon is told to stop", guarantee=True):
        _stop(check, settings, nbytes)
    with check.part("without a daemon", guarantee=True):
        _disabled(check, settings, nbytes)


def _upgrade(check: Check, settings: Settings, nbytes: int) -> None:
    with _served(settings, nbytes) as (_, daemon), _two(settings, daemon) as (one, two):
        expected, addresses = _made(one, two, nbytes)
        one.ask("hold", "a")
        began = time.monotonic()
        daemon.upgrade()
        check.row("from the signal to the line of the new program", time.monotonic() - began, "s")
        check.holds(
            "a lease that is held while the program is replaced computes on, and its graph replays",
            computes_and_replays(one, "a", expected["a"]),
        )
        one.ask("drop", "a")
        _as_before(check, "after the program was replaced", (one, two), expected, addresses)
        _no_problems(check, daemon, "replaced")


def _next_daemon(check: Check, settings: Settings, nbytes: int) -> None:
    with _served(settings, nbytes) as (folder, daemon), _two(settings, daemon) as (one, two):
        expected, addresses = _made(one, two, nbytes)
        one.ask("hold", "a")
        daemon.kill()
        computes = one.ask("compute", "a") == expected["a"]
        check.holds("without its daemon, a lease that is held computes on", computes)
        one.ask("drop", "a")
        with _serving(settings, folder, nbytes) as following:
            began = time.monotonic()
            one.ask("turn", "a")
            took_s = time.monotonic() - began
            check.row("from the next daemon's line to the first turn", took_s, "s")
            _as_before(check, "with the next daemon", (one, two), expected, addresses)
            _no_problems(check, following, "the next")


def _keeper(check: Check, settings: Settings, nbytes: int) -> None:
    keeps = {"keep_host": 2 * nbytes}
    with _served(settings, nbytes, **keeps) as (folder, daemon):
        with workers(settings, daemon.folder, "one") as (one,):
            wrote = one.ask("write_file", str(folder / "weights.safetensors"), nbytes)
            first = one.ask("load", "c", str(folder / "weights.safetensors"))
        kept = _keeps(daemon)
        daemon.kill()
        with _serving(settings, folder, nbytes, **keeps) as following:
            kept = kept and _keeps(following)
            with workers(settings, following.folder, "one", "two") as (one, two):
                expected = registered((two, "b"), nbytes=nbytes, layers=LAYERS)
                again = one.ask("load", "c", str(folder / "weights.safetensors"))
                note = f"{first['seconds']:.3g} s from the file, {again['seconds']:.3g} s after"
                held = kept and first["read"] and not again["read"]
                check.holds("the next daemon has the host copy, and no file is read", held, note)
                turned = two.ask("turn", "b")["digest"] == expected["b"]
                same = first["digest"] == again["digest"] == one.ask("loaded", "c") == wrote
                name = "its bytes are those of the file, also after an eviction"
                check.holds(name, same and turned)
            _no_problems(check, following, "with kept copies")


def _keeps(daemon: Daemon) -> bool:
    with connect(daemon.folder) as client:
        return comes_true(lambda: bool(client.status().kept))


def _stop(check: Check, settings: Settings, nbytes: int) -> None:
    with _served(settings, nbytes) as (_, daemon), _two(settings, daemon) as (one, two):
        expected, addresses = _made(one, two, nbytes)
        one.ask("turn", "a")
        began = time.monotonic()
        check.holds("a daemon that is told to stop ends", daemon.stop())
        check.row("from SIGTERM to its end, with two sessions", time.monotonic() - began, "s")
        for worker, name in ((one, "a"), (two, "b")):
            private = closes_in_place(worker, name, expected[name], addresses[name])
            check.holds(f"after the stop, {name} is private memory, where it was", private)


def _disabled(check: Check, settings: Settings, nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Worker(settings, Path(folder), "one") as one:
        device = "host" if settings.stub else settings.device  # torch's memory, which is the CPU's
        one.ask("start", disabled=True, device=device)
        expected = registered((one, "a"), nbytes=nbytes, layers=LAYERS)["a"]
        same = one.ask("turn", "a")["digest"] == one.ask("capture", "a") == expected
        check.holds("a model computes the same, and its graph replays, with swapd disabled", same)


# --- daemons and workers -----------------------------------------------------------------


@contextmanager
def _served(settings: Settings, nbytes: int, **flags: object) -> Iterator[tuple[Path, Daemon]]:
    """A folder, and a daemon with room for one model of `nbytes`."""
    with (
        tempfile.TemporaryDirectory(prefix="swapd-") as name,
        _serving(settings, Path(name), nbytes, **flags) as daemon,
    ):
        yield Path(name), daemon


@contextmanager
def _serving(settings: Settings, folder: Path, nbytes: int, **flags: Any) -> Iterator[Daemon]:
    flags |= {"device": settings.device, "chunk": settings.chunk_bytes}
    flags |= {"budget": chunks_of(nbytes, settings), "residency_bound": 0}
    daemon = Daemon(folder / "d", folder / "said", **flags)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.stop()


@contextmanager
def _two(settings: Settings, daemon: Daemon) -> Iterator[list[Worker]]:
    with workers(settings, daemon.folder, "one", "two", reconnect=RECONNECT_S) as both:
        yield both


def _made(one: Worker, two: Worker, nbytes: int) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Register a model in each, `a` with a graph; the outputs, and the addresses."""
    expected = registered((one, "a"), (two, "b"), nbytes=nbytes, layers=LAYERS)
    one.ask("capture", "a")
    return expected, {"a": one.ask("addresses", "a"), "b": two.ask("addresses", "b")}


def _as_before(
    check: Check,
    when: str,
    both: tuple[Worker, Worker],
    expected: dict[str, str],
    addresses: dict[str, list[int]],
) -> None:
    one, two = both
    turns = [two.ask("turn", "b"), one.ask("replay", "a"), two.ask("turn", "b")]
    same = [turn["digest"] for turn in turns] == [expected[name] for name in "bab"]
    check.holds(f"{when}, models and a graph compute the same", same)
    there = [turn["addresses"] for turn in turns] == [addresses[name] for name in "bab"]
    check.holds(f"{when}, every data_ptr is as before", there)


def _no_problems(check: Check, daemon: Daemon, which: str) -> None:
    problems = daemon.problems()
    check.holds(f"no traceback of the daemon ({which})", not problems, "; ".join(problems)[:500])
