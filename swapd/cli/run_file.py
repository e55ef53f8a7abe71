"""`swapd run FILE.toml`: several commands with names, and the daemons that they share."""

import glob
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import typer

import swapd_client
from swapd.cli.common import console, errors
from swapd.cli.run_file_plan import FilePlan, planned_file
from swapd.cli.run_plan import print_plan, write
from swapd.cli.run_told import LABEL, environment_on, records_of, watched
from swapd.run.daemons import Serving, Wanted, serving
from swapd.run.outcome import outcome
from swapd.run.several import file
from swapd.run.several.file import RunFile, Stage
from swapd.run.several.outcomes import outcomes, stage_of
from swapd.run.several.output import Output
from swapd.run.several.runner import Runner
from swapd.shared.config import ConfigError
from swapd.shared.text import plain
from swapd.shared.units import seconds, size
from swapd_client.errors import SwapdError

#: Suffix of a file of stages.
SUFFIX = ".toml"
#: What to write into a file instead of an option.
_IN_DAEMON = "write it into [daemon] of the file"
_IN_STAGE = "write a stage that uses the others, with ends_all = true, whose end is that of all"
_INSTEAD = {
    "--device": _IN_DAEMON,
    "--budget": _IN_DAEMON,
    "--set": _IN_DAEMON,
    "--config": _IN_DAEMON,
    "--until": _IN_STAGE,
    "--for": _IN_STAGE,
    "--ready": _IN_STAGE,
}
#: Seconds that a daemon may take to list its components; then it is asked again.
_ASKED_S = 1.0


def files(context: typer.Context, incomplete: str) -> list[str]:
    """For completion: files of stages, as the first word; a command completes its own words."""
    if context.params.get("words"):
        return []
    found = (Path(name) for name in glob.glob(f"{glob.escape(incomplete)}*"))
    return sorted(
        f"{one}/" if one.is_dir() else str(one)
        for one in found
        if one.is_dir() or one.suffix == SUFFIX
    )


def read_file(words: Sequence[str], given: Mapping[str, object]) -> RunFile:
    """The file that the words of `swapd run` name. `given`: options, by name, which are an error.

    Raises: ConfigError.
    """
    path = Path(words[0])
    if len(words) > 1:
        raise ConfigError(f"{path}: no word may follow a file of stages: {shlex.join(words[1:])}")
    for option, value in given.items():
        if value:
            raise ConfigError(f"{path}: {option} is for a single command: {_INSTEAD[option]}")
    return file.read(path)


def run_file(found: RunFile, folder: Path, device_memory: str | None, *, dry_run: bool) -> int:
    """Run all stages of a file; the exit status.

    Raises: ConfigError, PlanError, before anything is started.
    """
    plan = planned_file(found, folder, device_memory)
    if dry_run:
        print_file(plan)
        return 0
    write(plan.files)
    return _run(plan.file, plan.daemons, folder)


def print_file(plan: FilePlan) -> None:
    print_plan(plan.daemons, plan.files)
    for stage in plan.file.stages.values():
        console.print(plain(f"{_line(stage)}    # {_about(stage)}"), soft_wrap=True)


def _line(stage: Stage) -> str:
    """The stage as a command line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in stage.environment.items()]
    folder = shlex.quote(str(stage.directory))
    return " ".join([f"cd {folder} &&", *variables, shlex.join(stage.command.words)])


def _about(stage: Stage) -> str:
    after = f", after {', '.join(stage.after)}" if stage.after else ""
    retries = f" {stage.retries} times" if stage.retries is not None else ""
    restart = "" if stage.restart == "no" else f", restart {stage.restart}{retries}"
    ready = "" if stage.ready == "started" else f", ready when {stage.ready}"
    return f"{stage.name}{after}{restart}{ready}"


# --- run ---------------------------------------------------------------------------------


def _run(found: RunFile, wanted: Sequence[Wanted], folder: Path) -> int:
    with serving(wanted, folder) as daemons:
        for one in daemons:
            errors.print(plain(f"swapd: {one}, {size(one.wanted.budget)}"), soft_wrap=True)
            _say_what_is_not_applied(one, found.path)
        since = time.time()  # noqa: TID251 - of records
        status, runner = run_stages(found, daemons, folder)
        took = time.time() - since  # noqa: TID251
        logs = [records for one in daemons if (records := records_of(one)) is not None]
    devices = [outcome(records, since) for records in logs]
    stages = outcomes(runner.stages.told(), logs, since)
    for told in (*devices, *stages):
        errors.print(plain(f"swapd: {told}"), soft_wrap=True)
    errors.print(plain(f"swapd: ended with status {status} after {seconds(took)}"))
    return status


def run_stages(found: RunFile, daemons: Sequence[Serving], folder: Path) -> tuple[int, Runner]:
    """Run all stages to their end; return the exit status, and the fate of each. Main thread only.

    `folder`: answers of the daemons.
    """
    with _output(found.stages) as output, watched(daemons) as watch, _asked(daemons) as asked:
        here = [one for one in daemons if one.process is not None]

        def look() -> None:
            watch()
            _say_if_gone(here, folder, output)

        runner = Runner(found.stages, environment_on(daemons), output, asked, look)
        return runner.run(), runner


def _say_what_is_not_applied(one: Serving, path: Path) -> None:
    if one.process is None and one.wanted.others:
        names = ", ".join(name for name, _ in one.wanted.others)
        end = f"end it with `swapd stop --endpoint {one.folder}` to have one with these"
        kept = f"swapd: it keeps its own settings: not {names} of {path}; {end}"
        errors.print(plain(kept), soft_wrap=True)


def _say_if_gone(here: list[Serving], folder: Path, output: Output) -> None:
    """Say that a daemon is gone: each stage notices by itself, in many words."""
    for one in list(here):
        if one.process is not None and (status := one.process.poll()) is not None:
            here.remove(one)
            output.say(f"{one} has ended with status {status}; its log is in {folder}")


@contextmanager
def _output(names: Collection[str]) -> Iterator[Output]:
    out, err = _number(sys.stdout), _number(sys.stderr)
    terminal = os.isatty(out)
    output = Output(
        list(names),
        out,
        err,
        terminal=terminal,
        coloured=terminal and not console.no_color,
    )
    try:
        yield output
    finally:
        output.close()


def _number(stream: TextIO | None) -> int:
    """The descriptor of a stream, after a flush; of /dev/null if the stream is closed."""
    if stream is None:
        return os.open(os.devnull, os.O_WRONLY)
    stream.flush()
    return stream.fileno()


@contextmanager
def _asked(
    daemons: Sequence[Serving],
) -> Iterator[Callable[[Collection[str]], Collection[str]]]:
    """A call that asks daemons which of some stages have registered a component."""
    clients: list[swapd_client.Client] = []

    def asked(names: Collection[str]) -> Collection[str]:
        found: set[str] = set()
        with suppress(SwapdError, OSError):
            left = daemons[len(clients) :]
            clients.extend(swapd_client.connect(one.folder, label=LABEL) for one in left)
        for client in clients:
            with suppress(SwapdError, OSError):
                reply = client.status(timeout=_ASKED_S)
                labels = {one.session: one.label for one in reply.sessions}
                owners = [labels.get(component.session, "") for component in reply.components]
                found |= {name for label in owners if (name := stage_of(label, names))}
        return found

    try:
        yield asked
    finally:
        for client in clients:
            client.close()
