"""`swapd run --compare FILE.toml`: the stages of a file in two ways, and the table of both."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from swapd.cli.run_compare import Way, folder_of, in_turns, side_folder
from swapd.cli.run_file import print_file, run_stages
from swapd.cli.run_file_plan import FilePlan, planned_file
from swapd.run import compared
from swapd.run.compared import Round, Side
from swapd.run.daemons import Serving
from swapd.run.needs import names_swapd
from swapd.run.sampling import Sampler
from swapd.run.settings import BUDGET, Settings, names_of, with_settings
from swapd.run.several.file import DaemonTable, RunFile
from swapd.run.several.runner import Runner
from swapd.shared.config import ConfigError


class OfFile(NamedTuple):
    """The options of a comparison of a file."""

    #: Settings of the second side; none: the first side runs without swapd.
    changes: Sequence[str]
    rounds: int
    device_memory: str | None


def compare_file(found: RunFile, folder: Path, asked: OfFile, *, dry_run: bool) -> int:
    """Run the stages in both ways, print and keep the table; the exit status.

    Without swapd and with it; or, with `asked.changes`, as the file says and with these.
    Raises: ConfigError, PlanError, SwapdError before anything is run.
    """
    folder = folder_of(folder)
    _check_ends(found)
    if asked.changes:
        sides = _two_settings(found, asked.changes)
    else:
        _check_without(found)
        sides = [(Side(compared.WITHOUT, None), found), (Side(compared.WITH, Settings()), found)]
    ways = []
    for number, (side, its) in enumerate(sides, 1):
        logs = side_folder(folder, number)
        without = side.settings is None
        plan = FilePlan(its, [], {}) if without else planned_file(its, logs, asked.device_memory)
        ways.append(
            Way(
                side, plan.daemons, plan.files, partial(_run, plan, logs), partial(print_file, plan)
            )
        )
    words = ("swapd", "run", str(found.path.absolute()))
    comparison, status = in_turns(words, ways, folder, asked.rounds, dry_run=dry_run)
    return status or (comparison.status if comparison else 0)


# --- what is compared ----------------------------------------------------------------------


def _check_ends(found: RunFile) -> None:
    servers = [name for name, stage in found.stages.items() if stage.command.kind != "other"]
    if servers and not any(stage.ends_all for stage in found.stages.values()):
        raise ConfigError(
            f"{found.path}: {servers[0]} is a server and does not end by itself: write a stage "
            "that uses it, with ends_all = true, whose end is that of all"
        )


def _check_without(found: RunFile) -> None:
    """That the stages have a meaning without swapd, as far as the file shows."""
    instead = "compare two settings, with --set NAME=VALUE"
    for name, stage in found.stages.items():
        source = f"{found.path}: stages.{name}"
        if stage.ready == "registered":
            raise ConfigError(
                f'{source}.ready = "registered" would never come true without swapd: {instead}, or '
                'say ready = "started"'
            )
        if said := names_swapd(stage.command, stage.directory):
            raise ConfigError(
                f"{source}.command: {said} needs swapd, so it cannot run without: leave it out, as "
                f"`swapd run` adds the needed options; or {instead}"
            )


def _two_settings(found: RunFile, changes: Sequence[str]) -> list[tuple[Side, RunFile]]:
    """The file as it is, and with these settings in each of its daemons."""
    other = with_settings(Settings(), changes)
    names = names_of(changes)
    changed = found._replace(daemons=tuple(_changed(table, other) for table in found.daemons))
    if changed.daemons == found.daemons:
        raise ConfigError(f"--set {' '.join(changes)}: {found.path} has that already: say another")
    return [(_side(its, names), its) for its in (found, changed)]


def _changed(table: DaemonTable, to: Settings) -> DaemonTable:
    budget = table.budget if to.budget is None else to.budget
    return table._replace(budget=budget, flags={**table.flags, **dict(to.others)})


def _side(found: RunFile, names: Sequence[str]) -> Side:
    """Called as its settings are, in the first of its daemons."""
    table = found.daemons[0]
    given = None if table.budget is None else int(table.budget)  # less how it was typed
    settings = Settings(budget=given, others=tuple(table.flags.items()))
    shown = " ".join(f"{name}={settings.value(name)}" for name in names)
    only = {name: value for name, value in table.flags.items() if name in names}
    budget = given if BUDGET in names else None
    return Side(shown, msgspec.structs.replace(settings, budget=budget, others=tuple(only.items())))


# --- run -----------------------------------------------------------------------------------


def _run(plan: FilePlan, logs: Path, daemons: Sequence[Serving], sampler: Sampler) -> Round:
    began = time.monotonic()
    with _sampled(sampler):
        status, runner = run_stages(plan.file, daemons, logs)
    return Round(
        status=status,
        whole_s=time.monotonic() - began,
        load_s=_load_s(plan.file, runner),
        host_bytes=sampler.host_bytes,
        device_bytes=sampler.device_bytes,
        signal=runner.signal,
    )


def _load_s(found: RunFile, runner: Runner) -> float | None:
    """How long the stage ran whose end is that of all; None if there is not exactly one."""
    told = runner.stages.told()
    ends = [told[name].took_s for name, stage in found.stages.items() if stage.ends_all]
    return ends[0] if len(ends) == 1 else None


@contextmanager
def _sampled(sampler: Sampler) -> Iterator[None]:
    """Have samples taken in a thread: the stages are run in this one."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(max(0.0, sampler.due - time.monotonic())):
            sampler.sample()

    thread = threading.Thread(target=sample, name="swapd-sampler")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
