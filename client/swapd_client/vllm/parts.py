"""Divides a stage's model into components (itself and its encoders), and chooses their policies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch.nn import Module

from swapd.shared.protocol import Policy, part_name
from swapd_client.errors import InvalidArgument
from swapd_client.offload.copies import start_of
from swapd_client.offload.search import walk
from swapd_client.vllm.options import Options
from swapd_client.vllm.ranks import stage_of

#: Usual names of modules that only steps with encoder inputs use.
ENCODERS = ("visual", "audio_tower", "vision_tower")


Tensors = Mapping[str, torch.Tensor]


@dataclass
class StagePart:
    #: Name in the daemon: of the component, or of the family if it is divided by layers.
    name: str
    policy: Policy
    #: Whether only steps with encoder inputs need it.
    encoder: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Its tensors by part of the family, if it is divided by layers.
    layers: Mapping[str, Tensors] = field(default_factory=dict)
    #: If its layers stream: how many of them are on the device at a time.
    slots: int = 0

    @property
    def family(self) -> str:
        return self.name if self.layers else ""

    @property
    def sources(self) -> dict[str, Tensors]:
        if not self.layers:
            return {self.name: self.tensors}
        return {part_name(self.name, key): tensors for key, tensors in self.layers.items()}


def parts_of(
    models: Mapping[str, Module],
    options: Options,
    name: str,
    outside: Mapping[str, torch.Tensor] = MappingProxyType({}),
    aliases: Iterable[torch.Tensor] = (),
) -> list[StagePart]:
    """Return the components of a stage called `name`, the stage itself first; none is empty.

    `models`: the model under "", others (a drafter) under their names. `outside`: weights that are
    not parameters, by names that begin with their modules' paths. `aliases`: further tensors over
    the same memory. Raises: InvalidArgument.
    """
    _refuse(options, name)
    modules = {
        path: module
        for key, model in models.items()
        for path, module in model.named_modules(prefix=key)
    }
    inner = {path: _inner(path, options, name) for path in _paths(modules, options, name)}
    main = StagePart(name, _policy_of_main(options, name))
    stops = {id(modules[path]) for path in inner}
    for key, model in models.items():
        main.tensors |= dict(_parameters(key, model, stops))
    for path, part in inner.items():
        module = modules[path]
        part.tensors = dict(_parameters(path, module, stops - {id(module)}))
    for where, tensor in outside.items():
        inner.get(_prefix_of(where, inner), main).tensors[where] = tensor
    parts = [main, *inner.values()]
    _keep_together(parts)
    _add_aliases(parts, aliases)
    return [part for part in parts if part.tensors]


def _refuse(options: Options, name: str) -> None:
    if options.offload.enable_cpu_offload:
        raise InvalidArgument(
            f"{name}: enable_cpu_offload is for diffusion stages. An AR or generation stage has "
            "its encoders apart with cpu_offload_enabled: true, and streams layers with "
            "cpu_offload_gb, resident or enable_layerwise_offload"
        )


def _policy_of_main(options: Options, name: str) -> Policy:
    offload = options.offload
    if not offload.cpu_offload_enabled:
        return "permanent" if options.offload_said else "lru"
    named = offload.cpu_offload_components
    return _taking_turns(options) if named is None or _stage_itself(named, name) else "permanent"


def _stage_itself(named: Sequence[str], name: str) -> bool:
    return not {name, stage_of(name)}.isdisjoint(named)


def _taking_turns(options: Options) -> Policy:
    """A step needs several at once, so "alternating" must not make them exclude each other."""
    return "sequential" if options.offload.cpu_offload_strategy == "sequential" else "lru"


def _inner(path: str, options: Options, name: str) -> StagePart:
    last = path.rpartition(".")[2]
    return StagePart(f"{name}.{last}", _taking_turns(options), encoder=last in ENCODERS)


def _paths(modules: Mapping[str, Module], options: Options, name: str) -> list[str]:
    offload = options.offload
    if not offload.cpu_offload_enabled:
        return []
    named = offload.cpu_offload_components
    if named is None:
        found = [_outermost(one, modules) for one in ENCODERS]
    else:
        found = [_named(one, modules, name) for one in named if not _stage_itself((one,), name)]
    paths = list(filter(None, found))
    return [path for path in paths if not _prefix_of(path, paths)]


def _prefix_of(name: str, paths: Iterable[str]) -> str:
    return next((path for path in paths if name.startswith(f"{path}.")), "")


def _named(one: str, modules: Mapping[str, Module], name: str) -> str:
    if path := _outermost(one, modules):
        return path
    raise InvalidArgument(
        f"{name}: cpu_offload_components names {one!r}, but the stage has no such module; there "
        f"are: {name} itself, {', '.join(_children(modules))}"
    )


def _outermost(last: str, modules: Iterable[str]) -> str:
    matches = [path for path in modules if path == last or path.endswith(f".{last}")]
    return min(matches, key=lambda path: path.count("."), default="")


def _children(modules: Mapping[str, Module]) -> Iterator[str]:
    for path, module in modules.items():
        if path and path.count(".") < 2 and next(module.parameters(), None) is not None:
            yield path


def _parameters(
    path: str, root: Module, stops: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    inside = {id(module) for module in walk(root, stops)}
    for where, module in root.named_modules(prefix=path):
        if id(module) in inside:
            yield from module.named_parameters(prefix=where, recurse=False)


def _keep_together(parts: Sequence[StagePart]) -> None:
    """Put tensors that share memory into the first part that has one."""
    owner: dict[int, StagePart] = {}
    seen: set[int] = set()
    for part in parts:
        for name, tensor in list(part.tensors.items()):
            if id(tensor) in seen:
                del part.tensors[name]
                continue
            seen.add(id(tensor))
            start = start_of(tensor)
            if start and (other := owner.setdefault(start, part)) is not part:
                other.tensors[name] = part.tensors.pop(name)


def _add_aliases(parts: Sequence[StagePart], aliases: Iterable[torch.Tensor]) -> None:
    first = {
        start_of(tensor): (part, name)
        for part in reversed(parts)
        for name, tensor in reversed(list(part.tensors.items()))
    }
    for number, alias in enumerate(aliases):
        if (known := first.get(start_of(alias))) is not None:
            part, name = known
            part.tensors[f"{name}.alias{number}"] = alias
