"""`swapd run`: a command, with the daemons that it needs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from swapd.cli.common import errors, say_error
from swapd.cli.run_compare import Asked, list_all
from swapd.cli.run_compare import compare as compared
from swapd.cli.run_compare_file import OfFile, compare_file
from swapd.cli.run_file import SUFFIX, files, read_file, run_file
from swapd.cli.run_plan import planned, printed, write
from swapd.cli.run_told import environment_on, outcome_of, watched
from swapd.run import child
from swapd.run.child import CannotRun
from swapd.run.commands import command_of
from swapd.run.daemons import serving
from swapd.run.plans import RunPlan
from swapd.run.settings import Settings, from_file, with_settings
from swapd.shared import config
from swapd.shared.text import plain
from swapd.shared.units import parse_size, size

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND... | FILE.toml",
        help="The command, or a file of commands",
        autocompletion=files,
        show_default=False,
    ),
]
Devices = Annotated[
    list[str], typer.Option("--device", "-d", help="host, or a GPU, as in cuda:0; again for more")
]
Budget = Annotated[
    str | None, typer.Option("--budget", help="Device memory of each daemon, as in 40GiB")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--device-memory", help="Memory of each GPU, for the plan, as in 80GiB"),
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
List = Annotated[bool, typer.Option("--list", help="Show the last comparisons")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Repeat the comparison, for medians")]
UntilCommand = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="COMMAND",
        help="Compare a server: this command uses it once it is ready, and its end ends it",
    ),
]
ForSeconds = Annotated[
    str | None,
    typer.Option("--for", metavar="SECONDS", help="Compare a server: end it after this time"),
]
ReadyAt = Annotated[
    str | None,
    typer.Option(
        "--ready",
        help="Where it is ready once it answers: a port, HOST:PORT, http://... or a socket's "
        "path; default: /health of a vLLM server",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Print the plan, files and lines; start nothing")
]
#: Former names, which answer with the new ones until the next release.
FormerAgainst = Annotated[list[str], typer.Option("--against", hidden=True, help="--compare --set")]
FormerKept = Annotated[bool, typer.Option("--kept", hidden=True, help="--config")]


def run(
    words: Words = [],  # noqa: B006 - typer copies it
    device: Devices = [],  # noqa: B006
    budget: Budget = None,
    device_memory: DeviceMemory = None,
    config_file: ConfigFile = None,
    setting: Set = [],  # noqa: B006
    compare: Compare = False,
    rounds: Rounds = 1,
    until: UntilCommand = None,
    span: ForSeconds = None,
    ready: ReadyAt = None,
    list_: List = False,
    dry_run: DryRun = False,
    against: FormerAgainst = [],  # noqa: B006
    kept: FormerKept = False,
) -> None:
    """Run a command with the daemons that it needs, which end when it ends.

    `-- vllm serve MODEL` gets swapd's worker. `-- vllm-omni serve MODEL --omni` is planned as by
    `swapd plan --vllm`, and gets the overlay, over the deploy file that vllm-omni uses for the
    model, or that after `--deploy-config`. Any other command finds its daemon by $SWAPD_ENDPOINT.
    `swapd run` joins a running daemon whose budget is large enough. It passes signals on; the
    status is the command's.

    `--compare` runs the command without swapd and then with it, or with `--set` as it is and then
    with these settings, and prints a table of both: time, waiting, bytes, memory. A server needs
    `--until` or `--for`. `--list` shows the tables again; the better settings are in a file for
    `--config`.

    FILE.toml has several commands: [daemon] with settings of `swapd serve`, and [stages.NAME] with
    command, env, directory, restart (no, on-failure, always), retries, backoff, after, ready
    (started, registered, ended), ends_all and stop_timeout. Each line of their output begins with
    their name. The first that fails for good ends all, and its status is the run's; a second
    Ctrl-C kills. Stages of vLLM and vLLM-Omni that share a GPU are planned together. `--compare`
    takes such a file, too.
    deploy/README.md has the keys.
    """
    _check_names(against, kept=kept)
    if list_:
        list_all()
        return
    if not words:
        raise typer.BadParameter("give a command after --, or a file of commands")
    folder = config.state_folder() / "runs" / time.strftime("%Y-%m-%d-%H%M%S")
    if words[0].endswith(SUFFIX):
        given = {"--device": device, "--budget": budget, "--config": config_file}
        given |= {"--until": until, "--for": span, "--ready": ready}
        found_file = read_file(words, given if compare else {**given, "--set": setting})
        if compare:
            asked_of_file = OfFile(setting, rounds, device_memory)
            sys.exit(compare_file(found_file, folder, asked_of_file, dry_run=dry_run))
        if rounds > 1:
            raise typer.BadParameter("--rounds is for --compare")
        sys.exit(run_file(found_file, folder, device_memory, dry_run=dry_run))
    command = command_of(words)
    settings = from_file(config_file) if config_file else Settings()
    settings = msgspec.structs.replace(
        settings,
        devices=tuple(device),
        budget=settings.budget if budget is None else _size("--budget", budget),
        device_memory=device_memory,
    )
    if compare:
        asked = Asked(setting, rounds, until, span, ready)
        with _status_of_shell():
            sys.exit(compared(command, folder, settings, asked, dry_run=dry_run))
    if rounds > 1 or until or span or ready:
        raise typer.BadParameter("--rounds, --until, --for and --ready are for --compare: add it")
    found = planned(command, folder, with_settings(settings, setting))
    if dry_run:
        printed(found)
        return
    write(found.files)
    with _status_of_shell():
        sys.exit(_run(found, folder))


def runs(words: Annotated[list[str], typer.Argument(hidden=True)] = []) -> None:  # noqa: B006
    """Former name of `swapd run --list`."""
    raise typer.BadParameter("`swapd runs` is now `swapd run --list`")


def _check_names(against: list[str], *, kept: bool) -> None:
    if against:
        changes = " ".join(f"--set {one}" for one in against)
        raise typer.BadParameter(f"--against is now --compare {changes}")
    if kept:
        raise typer.BadParameter(
            "--kept is now --config FILE: `swapd run --list` shows the files with better settings"
        )


@contextmanager
def _status_of_shell() -> Iterator[None]:
    """Exit with the shell's status for a command that cannot run."""
    try:
        yield
    except CannotRun as exc:
        say_error(str(exc))
        sys.exit(exc.status)


def _size(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{option}: {exc}") from None


# --- run ---------------------------------------------------------------------------------


def _run(found: RunPlan, folder: Path) -> int:
    """Run it; return its exit status."""
    with serving(found.daemons, folder) as daemons:
        for one in daemons:
            errors.print(plain(f"swapd: {one}, {size(one.wanted.budget)}"), soft_wrap=True)
            if one.process is None and one.wanted.others:
                say_error(
                    "it keeps its own settings: --set is for daemons of this run; end it with "
                    f"`swapd stop --endpoint {one.folder}` to have one with these"
                )
        since = time.time()  # noqa: TID251 - of records
        with watched(daemons) as watch:
            environment = {**environment_on(daemons), **found.environment}
            status = child.run(found.command.words, environment, watch)
        outcomes = [told for one in daemons if (told := outcome_of(one, since)) is not None]
    for told in outcomes:
        errors.print(plain(f"swapd: {told}"), soft_wrap=True)
    return status
