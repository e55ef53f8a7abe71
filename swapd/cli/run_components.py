"""The components of the stages of `swapd run`: their names and their GPUs."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from swapd.plan.advice import PlanError
from swapd.plan.deploy import Deploy
from swapd.run import budgets, gpus
from swapd.run.commands import component_of, shards_of
from swapd.run.file import RunFile, StageSpec
from swapd.shared import config
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, gpus_in

_NAMED_BY = {
    "vllm": """--additional-config '{"swapd": {"component": "NAME"}}'""",
    "vllm-omni": "additional_config: {swapd: {component: NAME}} in its deploy file",
}


# --- names of components -------------------------------------------------------------------


def check_names(found: RunFile, read: Mapping[str, Deploy | None]) -> None:
    """Raise PlanError if two stages that run at once have components of one name in one daemon.

    `read`: the deploy files of vLLM-Omni servers, by stage, where known.
    """
    seen: dict[tuple[str, str], list[StageSpec]] = {}
    for stage in found.stages.values():
        for key in dict.fromkeys(_components(stage, found, read.get(stage.name))):
            for other in seen.get(key, ()):
                if not (_ends_before(other, stage, found) or _ends_before(stage, other, found)):
                    raise PlanError(
                        f"{found.path}: stages.{other.name} and stages.{stage.name} would both "
                        f"have a component called {key[0]} on {key[1]}, and its daemon has one of "
                        f"each name: give one of them another name, by "
                        f"{_NAMED_BY[stage.command.kind]}, or another device"
                    )
            seen.setdefault(key, []).append(stage)


def _components(stage: StageSpec, found: RunFile, read: Deploy | None) -> Iterator[tuple[str, str]]:
    host = on_host(found)
    for name, shards, on in _processes(stage, found, read, host=host):
        for device in ["host"] if host else [f"cuda:{gpu}" for gpu in on]:
            yield f"{name}.tp0" if shards > 1 else name, device


def _processes(
    stage: StageSpec, found: RunFile, read: Deploy | None, *, host: bool
) -> list[tuple[str, int, Sequence[int]]]:
    if stage.command.kind == "vllm":
        on = () if host else gpus_of(stage, found)
        return [(component_of(stage.command), shards_of(stage.command), on)]
    stages = read.stages if read else ()
    return [(one.name, one.shards * one.pipeline, one.gpus) for one in stages if one.has_components]


def _ends_before(first: StageSpec, then: StageSpec, found: RunFile) -> bool:
    before = [found.stages[name] for name in then.after]
    return first.ready == "ended" and any(
        one is first or _ends_before(first, one, found) for one in before
    )


# --- GPUs ----------------------------------------------------------------------------------


def devices_of(found: RunFile) -> list[str]:
    return [t.device for t in found.daemons if t.device not in (None, "host")]


def on_host(found: RunFile) -> bool:
    return {table.device or budgets.devices()[0] for table in found.daemons} == {"host"}


def gpus_of(stage: StageSpec, found: RunFile) -> tuple[int, ...]:
    """Return the GPUs of a server of plain vLLM, by their numbers on this machine. Raises:
    ConfigError if too few of the GPUs that the stage is shown have a daemon."""
    needed, said = shards_of(stage.command), stage.environment.get(VISIBLE_VARIABLE)
    usual = [f"cuda:{number}" for number in range(gpus.count() or needed)]
    numbers = gpus.numbers_of(devices_of(found) or usual)
    if said is None:
        return tuple(numbers[:needed])
    here = {n: gpus.name_of(f"cuda:{n}", config.listed_gpus()) for n in numbers}
    on = _numbers_of(gpus_in(said)[:needed], here)
    if len(on) == needed:
        return on
    known = ", ".join(f"cuda:{n} (GPU {name})" for n, name in here.items())
    count, which = ("GPUs", "these") if needed > 1 else ("GPU", "one of these")
    raise ConfigError(
        f"{found.path}: stages.{stage.name}.env.{VISIBLE_VARIABLE} = {said}: the stage needs "
        f"{needed} {count} of the daemons, which are on {known}: list {which}, or leave it out"
    )


def _numbers_of(names: Collection[str], here: Mapping[int, str]) -> tuple[int, ...]:
    found = (next((n for n, one in here.items() if gpus.same(one, name)), None) for name in names)
    return tuple(number for number in found if number is not None)
