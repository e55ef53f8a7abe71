"""What `swapd run` tells of daemons while commands run, and what it keeps of a run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

import swapd_client
from swapd.cli.common import OWN_LABEL, say_error
from swapd.log.history import last_run, read
from swapd.log.records import Record
from swapd.run import line
from swapd.run.daemons import Serving
from swapd.run.outcome import Outcome, outcome
from swapd.run.several.outcomes import StageOutcome
from swapd_client.errors import SwapdError

#: How these sessions are called.
LABEL = f"{OWN_LABEL}run"
#: How often the line is written anew, and how long a daemon may take to answer for it.
_LINE_S = 2.0


@contextmanager
def watched(daemons: Sequence[Serving]) -> Iterator[Callable[[], None]]:
    """What is to be called about once a second, to show the line; it asks the daemons."""
    with line.shown() as shown:
        clients: list[swapd_client.Client] = []
        if shown is not None:
            clients = [swapd_client.connect(one.folder, label=LABEL) for one in daemons]
        before = [0.0, 0.0]

        def watch() -> None:
            if shown is None or time.monotonic() - before[0] < _LINE_S:
                return
            with suppress(SwapdError, OSError):
                replies = [client.status(timeout=_LINE_S) for client in clients]
                swaps = float(sum(reply.loads for reply in replies))
                span = time.monotonic() - before[0]
                shown.say(line.words(replies, (swaps - before[1]) / span * 60 if before[0] else 0))
                before[:] = time.monotonic(), swaps

        try:
            yield watch
        finally:
            for client in clients:
                client.close()


def outcome_of(one: Serving, since: float) -> Outcome | None:
    """By the swap log; None if that cannot be read, which is said."""
    records = records_of(one)
    return None if records is None else outcome(records, since)


def records_of(one: Serving) -> list[Record] | None:
    """The swap log of a daemon's run so far; None if that cannot be read, which is said."""
    try:
        with swapd_client.connect(one.folder, label=LABEL) as client:
            path = Path(client.status().swap_log)
        return [each.record for each in last_run(read(path))]
    except (SwapdError, OSError) as exc:
        say_error(f"what happened on {one.wanted.device} is not known: {exc}")
        return None


class Kept(msgspec.Struct, frozen=True):
    """A run, as it is kept in the state folder."""

    command: tuple[str, ...]
    status: int
    took_s: float
    outcomes: tuple[Outcome, ...]
    #: Of several commands.
    stages: tuple[StageOutcome, ...] = ()


def keep(folder: Path, kept: Kept) -> None:
    """Where `swapd runs` finds it. That it cannot be kept is said."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_bytes(msgspec.json.encode(kept) + b"\n")
    except (OSError, UnicodeEncodeError) as exc:
        say_error(f"this run is not kept in {folder}: {exc}")
