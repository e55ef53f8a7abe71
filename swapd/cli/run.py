"""`swapd run`: a command, with the daemons that it needs."""

import glob
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from swapd.cli.common import note, option_of, say_error
from swapd.cli.comparisons import list_all
from swapd.cli.run_compare import ComparisonOptions
from swapd.cli.run_compare import compare as compare_both
from swapd.cli.run_plan import RunPlan, planned
from swapd.cli.run_stages import environment_on, logs_since, run_stages, say_serving
from swapd.run import child, file, outcome, servers
from swapd.run.child import CannotRun
from swapd.run.daemons import serving
from swapd.run.file import COMMAND, DaemonTable
from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.units import parse_size, parse_span, seconds, typed_size

_SUFFIX = ".toml"
_IN_DAEMON = "write it into [daemon] of the file"
_IN_STAGE = "write a stage that uses the others, with ends_all = true, whose end is that of all"
_INSTEAD = {
    **dict.fromkeys(("--device", "--budget", "--config", "--set"), _IN_DAEMON),
    **dict.fromkeys(("--until", "--for", "--ready"), _IN_STAGE),
}


def _files(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the first word with files of stages; a command completes its own words."""
    if context.params.get("words"):
        return []
    found = (Path(name) for name in glob.glob(f"{glob.escape(incomplete)}*"))
    return sorted(
        f"{one}/" if one.is_dir() else str(one)
        for one in found
        if one.is_dir() or one.suffix == _SUFFIX
    )


Devices = Annotated[
    list[str], typer.Option("--device", "-d", help="host, or a GPU, as in cuda:0; again for more")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings of the daemons, in TOML")
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the daemons; again for more"),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Run without swapd and with it, or with --set: as it is and with these settings",
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Repeat the comparison, for medians")]


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND... | FILE.toml",
            help="The command, or a file of commands",
            autocompletion=_files,
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    device: Devices = [],  # noqa: B006
    budget: Annotated[
        int | None, option_of(parse_size, "SIZE", "Device memory of each daemon, as in 40GiB")
    ] = None,
    device_memory: Annotated[
        int | None, option_of(typed_size, "SIZE", "Memory of each GPU, for the plan, as 80GiB")
    ] = None,
    config_file: ConfigFile = None,
    setting: Set = [],  # noqa: B006
    compare: Compare = False,
    rounds: Rounds = 1,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="COMMAND",
            help="Compare a server: this command uses it once it is ready, and its end ends it",
        ),
    ] = None,
    span: Annotated[
        float | None,
        option_of(parse_span, "SECONDS", "Compare a server: end it after this time", "--for"),
    ] = None,
    ready: Annotated[
        str | None,
        typer.Option(
            "--ready",
            help="Where it is ready once it answers: a port, HOST:PORT, http://... or a socket's "
            "path; default: /health of a vLLM server",
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the last comparisons")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print the plan, files and lines; start nothing")
    ] = False,
) -> None:
    """Run a command with the daemons that it needs, which end when it ends.

    `-- vllm serve MODEL` gets swapd's worker. `-- vllm-omni serve MODEL --omni` is planned as by
    `swapd plan --vllm`. It gets the resulting overlay over the deploy file that vllm-omni uses for
    the model, or over that after `--deploy-config`; its stages offload by `--cpu-offload-enabled`
    and the like. Any other command finds its daemon by $SWAPD_ENDPOINT.
    `swapd run` joins a running daemon whose budget is large enough. It passes signals on, and ends
    with the command's status.

    `--compare` runs the command without swapd and then with it, or with `--set` as it is and then
    with these settings, and prints a table of both: time, waiting, bytes, memory. A server needs
    `--until` or `--for`. `--list` shows the tables again; the better settings are in a file for
    `--config`.

    FILE.toml has several commands: [daemon] with settings of `swapd serve`, and [stages.NAME] with
    command, env, directory, restart (no, on-failure, always), retries, backoff, after, ready
    (started, registered, ended), ends_all and stop_timeout. Each line of their output begins with
    the name of its stage. The first stage that fails for good ends all, and its status is the
    run's; a second Ctrl-C kills. Stages of vLLM and vLLM-Omni that share a GPU are planned
    together. `--compare` takes such a file, too.
    deploy/README.md has the keys.
    """
    if list_:
        return list_all()
    if not words:
        raise typer.BadParameter("give a command after --, or a file of commands")
    options = ComparisonOptions(setting, rounds, until, span, ready)
    if not compare and options != ComparisonOptions(setting):
        raise typer.BadParameter("--rounds, --until, --for and --ready are for --compare: add it")
    changes = [] if compare else setting
    if words[0].endswith(_SUFFIX):
        given = {"--device": device, "--budget": budget, "--config": config_file, "--set": changes}
        found = _read(words, {**given, "--until": until, "--for": span, "--ready": ready})
    else:
        found = file.of_command(words, _tables(device, budget, config_file, changes))
    _say_unread(found)
    name = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    folder = config.state_folder() / "runs" / name
    try:
        if compare:
            sys.exit(compare_both(found, folder, options, device_memory, dry_run=dry_run))
        plan = planned(found, folder, device_memory)
        if dry_run:
            return plan.show()
        plan.write()
        sys.exit(_run(plan, folder))
    except CannotRun as exc:
        say_error(str(exc))
        sys.exit(exc.status)


def _tables(
    devices: list[str], budget: int | None, settings: Path | None, changes: Iterable[str]
) -> list[DaemonTable]:
    daemon = file.read_settings(settings) if settings else DaemonTable()
    daemon = daemon if budget is None else daemon._replace(budget=budget)
    daemon = daemon.changed(changes)
    return [daemon._replace(device=one) for one in devices] or [daemon]


def _say_unread(found: file.RunFile) -> None:
    for stage in found.stages.values():
        if unread := servers.unread(stage.command):
            note(unread)


def _read(words: Sequence[str], given: Mapping[str, object]) -> file.RunFile:
    path = Path(words[0])
    if len(words) > 1:
        raise ConfigError(f"{path}: no word may follow a file of stages: {shlex.join(words[1:])}")
    for option, value in given.items():
        if value not in (None, []):
            raise ConfigError(f"{path}: {option} is for a single command: {_INSTEAD[option]}")
    return file.read(path)


# --- run ---------------------------------------------------------------------------------


def _run(plan: RunPlan, folder: Path) -> int:
    runner = None
    with serving(plan.daemons, folder) as daemons:
        say_serving(daemons)
        since = time.monotonic()
        if plan.file.path is None:
            stage = plan.file.stages[COMMAND]
            environment = {**environment_on(daemons), **stage.environment}
            status, _ = child.run(stage.command.words, environment)
        else:
            status, runner = run_stages(plan.file, daemons, folder)
        took = time.monotonic() - since
        logs = logs_since(daemons, since)
    lines: list[object] = [outcome.of_device(records, since) for records in logs]
    if runner is not None:
        lines += outcome.of_stages(runner.stages.states, logs, since)
        lines.append(f"ended with status {status} after {seconds(took)}")
    for line in lines:
        note(str(line))
    return status
