"""A worker that keeps to the rules, beside others that do not: `honest.py FOLDER NAME FAMILY`.

It checks every byte of its components, and runs until its stdin ends. Then it prints its findings
as a line of JSON. A refusal, or a wait of more than PATIENCE_S, is a fault: its names are its own.
But any client may pin them, and end pins: so it ends those that leave it no room.
"""

import random
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from benchmarks.processes import MIB, until_stdin_ends
from swapd_client import (
    Client,
    Conflict,
    SwapdError,
    Timeout,
    TooLarge,
    UnknownComponent,
    connect,
)

#: Seconds; longer than any session of a fuzzer, which may hold components this waits for.
PATIENCE_S = 120.0


class Seen(msgspec.Struct):
    acquires: int = 0
    bytes_checked: int = 0
    wrong: int = 0
    endless: int = 0
    refusals: list[str] = []


def names_of(worker: str) -> list[str]:
    """Names that a worker of this name registers; the last is a family."""
    return [f"{worker}-clean", f"{worker}-mutable", f"{worker}-family"]


def main() -> None:
    folder, worker = Path(sys.argv[1]), sys.argv[2]
    seen = work(folder, worker, until_stdin_ends())
    print(msgspec.json.encode(seen).decode())  # noqa: T201


def work(folder: Path, worker: str, enough: threading.Event) -> Seen:
    seen, rng = Seen(), random.Random(worker)
    clean, mutable, family = names_of(worker)
    bytes_of = {clean: rng.randbytes(3 * MIB), mutable: rng.randbytes(2 * MIB)}
    parts = {"rest": rng.randbytes(MIB), "0": rng.randbytes(2 * MIB), "1": rng.randbytes(2 * MIB)}
    with connect(folder, label=worker) as client:
        views = {
            clean: client.register(clean, {"x": bytearray(bytes_of[clean])}).view("x"),
            mutable: client.register(
                mutable, {"x": bytearray(bytes_of[mutable])}, mutable=True
            ).view("x"),
        }
        blocks = {key: {"x": bytearray(data)} for key, data in parts.items()}
        for part, (key, data) in zip(
            client.register_family(family, blocks), parts.items(), strict=True
        ):
            bytes_of[f"{family}/{key}"], views[f"{family}/{key}"] = data, part.view("x")
        print("ready", flush=True)  # noqa: T201
        while not enough.is_set():
            name = rng.choice([clean, mutable, family])
            try:
                with client.acquire(name, timeout=PATIENCE_S):
                    for key in [key for key in views if key.startswith(name)]:
                        seen.wrong += views[key] != bytes_of[key]
                        seen.bytes_checked += len(bytes_of[key])
                    if name == mutable:
                        bytes_of[name] = rng.randbytes(16) + bytes_of[name][16:]
                        views[name][:16] = bytes_of[name][:16]
                seen.acquires += 1
            except Timeout:
                seen.endless += 1
            except TooLarge as exc:
                if "Pinned: " in str(exc):
                    end_pins(client)
                else:
                    seen.refusals.append(f"TooLarge: {exc}")
            except SwapdError as exc:
                seen.refusals.append(f"{type(exc).__name__}: {exc}")
                if client.session.error is not None:
                    break
    return seen


def end_pins(client: Client) -> None:
    for component in client.status(timeout=PATIENCE_S).components:
        if component.pinned:
            with suppress(UnknownComponent, Conflict):  # its fuzzer has gone, or has ended the pin
                client.unpin(component.name)


if __name__ == "__main__":
    main()
