"""The plan of `swapd run`: its settings, and everything that it starts and writes."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from swapd.cli.common import console, errors
from swapd.cli.plan_vllm import Asked, reports_of
from swapd.plan import deploy
from swapd.plan.advise import PlanError
from swapd.plan.chunks import Isolation
from swapd.plan.deploy import Deploy
from swapd.plan.shares import GpuPlan
from swapd.run import budgets, gpus, models, plans
from swapd.run.commands import DEPLOY_CONFIG, Command
from swapd.run.daemons import Wanted, joinable
from swapd.run.plans import RunPlan
from swapd.run.settings import Settings
from swapd.shared.text import plain
from swapd.shared.units import size


def planned(command: Command, folder: Path, settings: Settings) -> RunPlan:
    """The plan for a command of any kind; writes nothing. Raises: PlanError."""
    gpus.check(settings.devices, "-d")
    if command.kind == "vllm-omni" and not on_host(settings.devices):
        found = plan_omni(command, folder, settings)
    else:
        if command.kind == "vllm-omni":
            say_not_planned([deploy_of(command)])
        found = plans.plan(command, settings.devices, settings.budget)
    return found._replace(daemons=[one._replace(others=settings.others) for one in found.daemons])


def on_host(devices: Collection[str]) -> bool:
    """Whether all devices are the host, for which vLLM-Omni cannot be planned."""
    return set(devices) == {"host"}


def say_not_planned(found: Iterable[Deploy | None]) -> None:
    """Say that servers of vLLM-Omni run as they are; `found`: their deploy files, None: unknown."""
    said = "swapd: vllm-omni runs with its own settings, since swapd plans it for GPUs only"
    if not all(one and any(s.has_components for s in one.stages) for one in found):
        said += ": have its --deploy-config name swapd's workers"
    errors.print(said, soft_wrap=True)


def deploy_of(command: Command) -> Deploy | None:
    """The deploy file of a server of vLLM-Omni as it is; None if it is unknown. Blocks as
    `plans.deploy_file_of`."""
    if command.model is None:
        return None
    try:
        file = plans.deploy_file_of(command)
        return deploy.read(file.path, installed=file.installed)
    except PlanError:
        return None  # vllm-omni says so


def printed(found: RunPlan) -> None:
    """Print the plan: command lines, files and their texts."""
    print_plan(found.daemons, found.files)
    variables = [f"{name}={shlex.quote(value)} " for name, value in found.environment.items()]
    line = f"{''.join(variables)}{shlex.join(found.command.words)}"
    console.print(plain(line), soft_wrap=True)


def print_plan(daemons: Iterable[Wanted], files: Mapping[Path, str]) -> None:
    """Print the daemons' command lines, and the files with their texts."""
    for one in daemons:
        there = joinable(one)
        what = f"joins the one at {there}" if there else one.line
        console.print(plain(f"{what}    # {size(one.budget)}: {one.why}"), soft_wrap=True)
    for path, text in files.items():
        console.print(plain(f"# {path}"), style="dim", soft_wrap=True)
        typer.echo(text, nl=False)


def write(files: Mapping[Path, str]) -> None:
    """Write the files of a plan. Raises: OSError."""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class OmniServer(NamedTuple):
    """A server of vLLM-Omni to plan."""

    #: The command to start, less the overlay.
    command: Command
    #: The model's folder.
    model: Path
    found: Deploy
    #: The file for its overlay.
    overlay: Path

    @property
    def asked(self) -> Asked:
        return Asked(self.found, [str(self.model)])

    @property
    def planned(self) -> Command:
        """The command to start."""
        return self.command.with_option(DEPLOY_CONFIG, str(self.overlay))


def omni_server(
    command: Command, overlay: Path, devices: Sequence[str], seen: Command | None = None
) -> OmniServer:
    """A server whose deploy file was read and has swapd's workers in all stages; writes nothing.

    Names the deploy file if the command does not. `devices`: those of the daemons, if the user
    named any. `seen`: the command with its files' paths from here. Raises: PlanError.
    """
    seen = seen or command
    if seen.model is None:
        raise PlanError(f"the model is missing after serve: {shlex.join(command.words)}")
    model = models.folder_of(seen)
    file = plans.deploy_file_of(seen)
    if file.why:
        errors.print(plain(f"swapd: the deploy file is {file.path}: {file.why}"), soft_wrap=True)
    usable = devices or budgets.devices()
    numbers = [number for one in usable if (number := gpus.number_of(one)) is not None]
    own, moved = plans.with_workers(file.path, file.installed, numbers)
    for each in moved:
        errors.print(plain(f"swapd: {each}"), soft_wrap=True)
    path = file.path if own is None else overlay
    found = deploy.read(path, own, file.installed)
    plans.check_placed(file.path, found.stages, devices)
    return OmniServer(command, model, found, overlay)


def isolation_in(settings: Iterable[tuple[str, str]]) -> Isolation:
    """The isolation of a daemon with these settings."""
    return "strict" if ("isolation", "strict") in settings else "relaxed"


def plan_omni(command: Command, folder: Path, settings: Settings) -> RunPlan:
    """The plan for vllm-omni; writes nothing. `folder` is the run's. Raises: PlanError, with the
    sum."""
    server = omni_server(command, folder / "deploy.yaml", settings.devices)
    on = [gpu for stage in server.found.stages for gpu in stage.gpus]
    given = {} if settings.budget is None else dict.fromkeys(on, settings.budget)
    found = reports_of(
        [server.asked],
        budgets=given,
        device_memory=settings.device_memory,
        chunk=dict(settings.others).get("chunk"),
        isolation=isolation_in(settings.others),
    )
    wanted = [
        planned_daemon(gpu, settings.budget, "--budget") for gpu in found.gpus if gpu.budget_bytes
    ]
    return RunPlan(server.planned, wanted, {server.overlay: found.reports[0].overlay})


def planned_daemon(gpu: GpuPlan, budget: int | None, why: str) -> Wanted:
    """The daemon of a planned GPU. `budget`: the user's, if given, and `why` is its reason."""
    planned = gpu.budget_bytes, "the budget in the plan"
    nbytes, source = planned if budget is None else (budget, why)
    return Wanted(f"cuda:{gpu.gpu}", nbytes, source, gpu.chunk_bytes)
