"""Runs the stages of `swapd run` against daemons that serve, with their output and log."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import swapd_client
from swapd.cli.common import console, note, say_error
from swapd.cli.target import OWN_LABEL, TIMEOUT_S, connected
from swapd.log.reader import read, runs_since
from swapd.log.records import Record
from swapd.run import ready
from swapd.run.daemons import ServingDaemon, endpoint_of
from swapd.run.file import RunFile
from swapd.run.outcome import stage_of
from swapd.run.output import Output
from swapd.run.ready import ServerAddress
from swapd.run.runner import Runner
from swapd.shared import config
from swapd.shared.units import size
from swapd_client.errors import SwapdError

_LABEL = f"{OWN_LABEL}run"
#: Longest wait for a daemon or its list of components, before the next attempt: meanwhile neither
#: signals nor the ends of stages are seen.
_ASKED_S = 1.0


def run_stages(
    found: RunFile,
    daemons: Sequence[ServingDaemon],
    folder: Path,
    address: ServerAddress | None = None,
) -> tuple[int, Runner]:
    """Run all stages to their end; return the exit status and the runner. Main thread only.

    `folder`: logs of the daemons. `address`: where a stage with ready="answers" answers.
    """
    with closing(_output(found.stages)) as output, _up(daemons, address) as up:
        here = [one for one in daemons if one.process is not None]
        look = partial(_say_if_gone, here, folder, output)
        pids = [one.process.pid for one in here if one.process is not None]
        runner = Runner(found.stages, environment_on(daemons), output, up, look, pids)
        return runner.run(), runner


def say_serving(daemons: Sequence[ServingDaemon]) -> None:
    for one in daemons:
        note(f"{one}, {size(one.budget)}")
        if one.process is None and one.wanted.others:
            names = ", ".join(name for name, _ in one.wanted.others)
            of = f" of {one.wanted.file}" if one.wanted.file else ""
            note(
                f"it keeps its own settings: not {names}{of}; end it with `swapd stop --endpoint "
                f"{one.folder}` to have one with these"
            )


def environment_on(daemons: Sequence[ServingDaemon]) -> dict[str, str]:
    """Return the environment of a command with these daemons; without any, no endpoint is set."""
    if daemons:
        return config.environment_with(SWAPD_ENDPOINT=endpoint_of(daemons))
    environment = config.environment_with()
    environment.pop(config.ENDPOINT_VARIABLE, None)
    return environment


def logs_since(daemons: Sequence[ServingDaemon], since: float) -> list[list[Record]]:
    """Return the swap log of each daemon that served at `since`, a monotonic time, and of those
    that were put in its place. If one is unreadable, say so and leave it out."""
    logs = []
    for one in daemons:
        try:
            with connected(one.folder, "run") as client:
                path = Path(client.status(timeout=TIMEOUT_S).swap_log)
            logs.append([each.record for each in runs_since(read(path), since)])
        except (SwapdError, OSError) as exc:
            say_error(f"the outcome on {one.wanted.device} is unknown: {exc}")
            if one.process is None:
                note(
                    "this run had joined it: one that another `swapd run` has started ends with "
                    "that run; start one for both with `swapd serve`"
                )
    return logs


def _say_if_gone(here: list[ServingDaemon], folder: Path, output: Output) -> None:
    """Report once that a daemon has ended: each stage reports it too, in many words."""
    for one in list(here):
        if one.process is not None and (status := one.process.poll()) is not None:
            here.remove(one)
            output.say(f"{one} has ended with status {status}; its log is in {folder}")


def _output(names: Collection[str]) -> Output:
    out, err = _number(sys.stdout), _number(sys.stderr)
    terminal = os.isatty(out)
    coloured = terminal and not console.no_color
    return Output(list(names), out, err, terminal=terminal, coloured=coloured)


def _number(stream: TextIO | None) -> int:
    if stream is None:
        return os.open(os.devnull, os.O_WRONLY)
    stream.flush()
    return stream.fileno()


@contextmanager
def _up(
    daemons: Sequence[ServingDaemon], address: ServerAddress | None
) -> Iterator[Callable[[Collection[str]], Collection[str]]]:
    clients: list[swapd_client.Client] = []

    def up(names: Collection[str]) -> Collection[str]:
        if address is not None:
            return names if ready.answers(address) else ()
        found: set[str] = set()
        with suppress(SwapdError, OSError):
            for one in daemons[len(clients) :]:
                client = swapd_client.connect(one.folder, label=_LABEL, timeout=_ASKED_S)
                clients.append(client)
        for client in clients:
            with suppress(SwapdError, OSError):
                reply = client.status()
                labels = {one.session: one.label for one in reply.sessions}
                owners = [labels.get(component.session, "") for component in reply.components]
                found |= {name for label in owners if (name := stage_of(label, names))}
        return found

    try:
        yield up
    finally:
        for client in clients:
            client.close()
