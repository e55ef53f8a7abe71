"""`swapd run` with daemons: the status line while commands run, and the outcome from their logs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import swapd_client
from swapd.cli.common import OWN_LABEL, say_error
from swapd.log.history import last_run, read
from swapd.log.records import Record
from swapd.run import line
from swapd.run.daemons import Serving, endpoint_of
from swapd.run.outcome import Outcome, outcome
from swapd.shared import config
from swapd_client.errors import SwapdError

#: The label of these sessions.
LABEL = f"{OWN_LABEL}run"
#: Seconds between two updates of the line, and a daemon's time to answer for one.
_LINE_S = 2.0


@contextmanager
def watched(daemons: Sequence[Serving]) -> Iterator[Callable[[], None]]:
    """A call that shows the line, to be made about once a second; it asks the daemons."""
    with line.shown() if daemons else nullcontext() as shown:
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
    """The outcome from the swap log; None if that is unreadable, with a message."""
    records = records_of(one)
    return None if records is None else outcome(records, since)


def records_of(one: Serving) -> list[Record] | None:
    """The swap log of a daemon's run so far; None if that is unreadable, with a message."""
    try:
        with swapd_client.connect(one.folder, label=LABEL) as client:
            path = Path(client.status().swap_log)
        return [each.record for each in last_run(read(path))]
    except (SwapdError, OSError) as exc:
        say_error(f"the outcome on {one.wanted.device} is unknown: {exc}")
        return None


def environment_on(daemons: Sequence[Serving]) -> dict[str, str]:
    """The environment of a command which uses these daemons; it names none if there are none."""
    if daemons:
        return config.environment_with(endpoint_of(daemons))
    environment = config.environment_with("")
    del environment[config.ENDPOINT_VARIABLE]
    return environment
