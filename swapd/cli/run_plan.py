"""What `swapd run` is about to do: with which settings, and all that it starts and writes."""

import re
import shlex
from pathlib import Path

import typer

from swapd.cli.common import console, errors, say_error
from swapd.cli.plan_vllm import report_of
from swapd.plan import deploy
from swapd.plan.advise import PlanError
from swapd.run import budgets, kept, plans
from swapd.run.commands import DEPLOY_CONFIG, Command
from swapd.run.daemons import Wanted, joinable
from swapd.run.kept import CannotKeep
from swapd.run.plans import RunPlan
from swapd.run.settings import Settings
from swapd.shared import config
from swapd.shared.config import ConfigError
from swapd.shared.text import plain
from swapd.shared.units import size


def chosen(command: Command, given: Settings, *, use_kept: bool) -> Settings:
    """What is given; and what is kept for the model where that is to be used, else it is offered.

    Raises: ConfigError if nothing is kept that is to be used; CannotKeep.
    """
    if command.model is None:
        if use_kept:
            raise ConfigError("--kept: settings are kept for models, and this command names none")
        return given
    model = kept.key_of(command.model)
    try:
        found = kept.all_of(config.state_folder()).get(model)
    except CannotKeep as exc:
        if use_kept:
            raise
        say_error(str(exc))
        return given
    if use_kept and found is None:
        raise ConfigError(
            f"--kept: no settings are kept for {model}; `swapd run --compare` keeps those that "
            "proved good"
        )
    if found is None or given.over(found.settings) == given:
        return given
    about = f"{found.settings.options} ({found.why})"
    if use_kept:
        errors.print(plain(f"swapd: as kept for {model}: {about}"), soft_wrap=True)
        return given.over(found.settings)
    errors.print(
        plain(f"swapd: settings are kept for {model}: {about}; `swapd run --kept` uses them"),
        soft_wrap=True,
    )
    return given


def planned(command: Command, folder: Path, settings: Settings) -> RunPlan:
    """What is to be started, of a command of any kind; nothing is written. Raises: PlanError."""
    if command.kind == "vllm-omni":
        found = plan_omni(command, folder, settings)
    else:
        found = plans.plan(command, settings.devices, settings.budget)
    return found._replace(daemons=[one._replace(others=settings.others) for one in found.daemons])


def printed(found: RunPlan) -> None:
    """As it would be done: lines, files and their texts."""
    for one in found.daemons:
        there = joinable(one)
        what = f"joins the one at {there}" if there else one.line
        console.print(plain(f"{what}    # {size(one.budget)}: {one.why}"), soft_wrap=True)
    for path, text in found.files.items():
        console.print(plain(f"# {path}"), style="dim", soft_wrap=True)
        typer.echo(text, nl=False)
    console.print(plain(shlex.join(found.command.words)), soft_wrap=True)


def plan_omni(command: Command, folder: Path, settings: Settings) -> RunPlan:
    """What is to be started; nothing is written. `folder`: of the run. Says which deploy file is
    used if the command does not. Raises: PlanError, with the sum."""
    if command.model is None:
        raise PlanError("say which model: vllm-omni serve MODEL --omni ...")
    file = plans.deploy_file_of(command)
    if file.why:
        errors.print(plain(f"swapd: the deploy file is {file.path}: {file.why}"), soft_wrap=True)
    overlay = folder / "deploy.yaml"
    devices = settings.devices or budgets.devices()
    gpus = [int(device[5:]) for device in devices if re.fullmatch(r"cuda:\d+", device)]
    own, moved = plans.with_workers(file.path, file.package, gpus)
    for each in moved:
        errors.print(plain(f"swapd: {each}"), soft_wrap=True)
    path = file.path if own is None else overlay
    found = deploy.read(path, own, file.package)
    report = report_of(
        found,
        [command.model],
        device_memory=settings.device_memory,
        chunk=dict(settings.others).get("chunk"),
        isolation="strict" if ("isolation", "strict") in settings.others else "relaxed",
    )
    wanted = [
        Wanted(
            f"cuda:{gpu.gpu}",
            settings.budget or gpu.budget_bytes,
            "what the plan says",
            gpu.chunk_bytes,
        )
        for gpu in report.gpus
        if gpu.budget_bytes
    ]
    return RunPlan(
        command.with_option(DEPLOY_CONFIG, str(overlay)), wanted, {overlay: report.overlay}
    )
