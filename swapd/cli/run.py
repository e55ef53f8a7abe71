"""`swapd run`: a command, with the daemons that it needs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from swapd.cli.common import errors, say_error
from swapd.cli.run_compare import Asked
from swapd.cli.run_compare import compare as compared
from swapd.cli.run_compare_file import OfFile, compare_file
from swapd.cli.run_file import SUFFIX, files, read_file, run_file
from swapd.cli.run_plan import chosen, planned, printed, write
from swapd.cli.run_told import Kept, environment_on, keep, outcome_of, watched
from swapd.run import child
from swapd.run.child import CannotRun
from swapd.run.commands import command_of
from swapd.run.daemons import serving
from swapd.run.plans import RunPlan
from swapd.run.settings import Settings, with_settings
from swapd.shared import config
from swapd.shared.text import plain
from swapd.shared.units import parse_size, size

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND... | FILE.toml",
        help="The command, or a file of commands",
        autocompletion=files,
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
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the daemons; again for more"),
]
UseKept = Annotated[bool, typer.Option("--kept", help="Use the settings stored for the model")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Run without swapd and with it, and print a table of both")
]
Against = Annotated[
    list[str],
    typer.Option(
        "--against",
        metavar="NAME=VALUE",
        help="Compare with another setting, as in budget=40GiB; again for more",
    ),
]
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


def run(
    words: Words,
    device: Devices = [],  # noqa: B006 - typer copies it
    budget: Budget = None,
    device_memory: DeviceMemory = None,
    setting: Set = [],  # noqa: B006
    use_kept: UseKept = False,
    compare: Compare = False,
    against: Against = [],  # noqa: B006
    rounds: Rounds = 1,
    until: UntilCommand = None,
    span: ForSeconds = None,
    ready: ReadyAt = None,
    dry_run: DryRun = False,
) -> None:
    """Run a command with the daemons that it needs, which end when it ends.

    `-- vllm serve MODEL` gets swapd's worker. `-- vllm-omni serve MODEL --omni` is planned as by
    `swapd plan --vllm`, and gets the overlay, over the deploy file that vllm-omni uses for the
    model, or that after `--deploy-config`. Any other command finds its daemon by $SWAPD_ENDPOINT.
    `swapd run` joins a running daemon whose budget is large enough. It passes signals on; the
    status is the command's.

    `--compare` runs the command without swapd and then with it, `--against` with two settings, and
    keeps the table of both: time, waiting, bytes, memory. A server needs `--until` or `--for`. The
    better settings are stored for the model; `--kept` uses them again.

    FILE.toml has several commands: [daemon] with settings of `swapd serve`, and [stages.NAME] with
    command, env, directory, restart (no, on-failure, always), retries, backoff, after, ready
    (started, registered, ended), ends_all and stop_timeout. Each line of their output begins with
    their name. The first that fails for good ends all, and its status is the run's; a second
    Ctrl-C kills. Stages of vLLM and vLLM-Omni that share a GPU are planned together. `--compare`
    and `--against` take such a file, too.
    deploy/README.md has the keys.
    """
    folder = config.state_folder() / "runs" / time.strftime("%Y-%m-%d-%H%M%S")
    if words[0].endswith(SUFFIX):
        found_file = read_file(
            words,
            {"--device": device, "--budget": budget, "--set": setting, "--kept": use_kept}
            | {"--until": until, "--for": span, "--ready": ready},
        )
        if compare or against:
            asked_of_file = OfFile(against, rounds, device_memory)
            sys.exit(compare_file(found_file, folder, asked_of_file, dry_run=dry_run))
        if rounds > 1:
            raise typer.BadParameter("--rounds is for --compare and --against")
        sys.exit(run_file(found_file, folder, device_memory, dry_run=dry_run))
    command = command_of(words)
    options = Settings(tuple(device), _size("--budget", budget), device_memory)
    settings = chosen(command, with_settings(options, setting, "--set"), use_kept=use_kept)
    asked = Asked(against, rounds, until, span, ready)
    if compare or against:
        with _status_of_shell():
            sys.exit(compared(command, folder, settings, asked, dry_run=dry_run))
    if rounds > 1 or until or span or ready:
        raise typer.BadParameter(
            "--rounds, --until, --for and --ready are for --compare and --against: add one of them"
        )
    found = planned(command, folder, settings)
    if dry_run:
        printed(found)
        return
    write(found.files)
    with _status_of_shell():
        sys.exit(_run(found, folder))


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
        took = time.time() - since  # noqa: TID251
    keep(folder, Kept(found.command.words, status, took, tuple(outcomes)))
    for told in outcomes:
        errors.print(plain(f"swapd: {told}"), soft_wrap=True)
    return status
