"""Division of a stage's model into components, and their policies.

A stage is one component, or itself and its encoders. Lives here: names, tensors, policies.
`layers.py` divides components by layers. May not live here: the daemon, leases, vLLM.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch.nn import Module

from swapd.shared.protocol import Policy, part_name
from swapd_client.errors import InvalidSettings
from swapd_client.offload.copies import start_of
from swapd_client.offload.find import walk
from swapd_client.vllm.options import Options

#: Usual names of modules that only steps with encoder inputs use.
ENCODERS = ("visual", "audio_tower", "vision_tower")


#: By name in the model.
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Part:
    """One component to register."""

    #: Name in the daemon; of a component that is evicted by layers, its family's name.
    name: str
    policy: Policy
    #: Whether only steps with encoder inputs need it.
    encoder: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: If it is evicted by layers: its tensors, by part of the family called `name`.
    layers: Mapping[str, Tensors] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family of its parts; "" if it has none."""
        return self.name if self.layers else ""

    @property
    def sources(self) -> dict[str, Tensors]:
        """The sources to register, by name in the daemon: itself, or its parts."""
        if not self.layers:
            return {self.name: self.tensors}
        return {part_name(self.name, key): tensors for key, tensors in self.layers.items()}


def parts_of(
    models: Mapping[str, Module],
    options: Options,
    name: str,
    outside: Mapping[str, torch.Tensor] = MappingProxyType({}),
    aliases: Iterable[torch.Tensor] = (),
) -> list[Part]:
    """The components of a stage called `name`, the stage itself first; none is empty.

    `models`: the model, under "", and other models with weights (a drafter), under their names.
    `outside`: weights that are not parameters, by names that begin with the paths of their modules.
    `aliases`: further tensors over the same memory. Weights that an encoder shares with the rest
    belong to the rest. Raises: InvalidSettings.
    """
    _refuse(options, name)
    modules = {
        ".".join(filter(None, (key, path))): module
        for key, model in models.items()
        for path, module in model.named_modules()
    }
    paths = _paths(modules, options, name)
    inner = {id(modules[path]): _inner(path, options, name) for path in paths}
    main = Part(name, _policy_of_main(options, name))
    for key, model in models.items():
        main.tensors |= dict(_parameters(key, model, inner))
    for path in paths:
        module = modules[path]
        others = inner.keys() - {id(module)}
        inner[id(module)].tensors = dict(_parameters(path, module, others))
    for where, tensor in outside.items():
        at = next((path for path in paths if where.startswith(f"{path}.")), None)
        (main if at is None else inner[id(modules[at])]).tensors[where] = tensor
    _keep_together([main, *inner.values()])
    _add_aliases([main, *inner.values()], aliases)
    return [part for part in (main, *inner.values()) if part.tensors]


def _refuse(options: Options, name: str) -> None:
    for setting in ("enable_cpu_offload", "enable_layerwise_offload", "cpu_offload_gb"):
        if getattr(options.offload, setting):
            raise InvalidSettings(
                f"{name}: {setting} is for diffusion stages; an AR or generation stage is loaded "
                "whole, with its encoders apart if it sets cpu_offload_enabled: true"
            )


def _policy_of_main(options: Options, name: str) -> Policy:
    offload = options.offload
    if not offload.cpu_offload_enabled:
        return "permanent" if options.offload_said else "lru"
    named = offload.cpu_offload_components
    return _taking_turns(options) if named is None or _stage_itself(named, name) else "permanent"


def _stage_itself(named: Sequence[str], name: str) -> bool:
    return name in named or name.partition(".")[0] in named


def _taking_turns(options: Options) -> Policy:
    """A step needs several at once, so alternating ones must not exclude each other."""
    return "sequential" if options.offload.cpu_offload_strategy == "sequential" else "lru"


def _inner(path: str, options: Options, name: str) -> Part:
    last = path.rpartition(".")[2]
    return Part(f"{name}.{last}", _taking_turns(options), encoder=last in ENCODERS)


def _paths(modules: Mapping[str, Module], options: Options, name: str) -> list[str]:
    """Paths of the stage's inner components: outermost modules, by the last part of their path."""
    offload = options.offload
    if not offload.cpu_offload_enabled:
        return []
    named = offload.cpu_offload_components
    found: list[str] = []
    for one in ENCODERS if named is None else named:
        if named is not None and _stage_itself((one,), name):
            continue
        matches = [path for path in modules if path == one or path.endswith(f".{one}")]
        if not matches and named is not None:
            raise InvalidSettings(
                f"{name}: cpu_offload_components names {one!r}, but the stage has no such module; "
                f"there are: {name} itself, {', '.join(_children(modules))}"
            )
        found += sorted(matches, key=lambda path: path.count("."))[:1]
    return [path for path in found if not any(path.startswith(f"{outer}.") for outer in found)]


def _children(modules: Mapping[str, Module]) -> Iterator[str]:
    """Names that the option accepts: modules with weights, at most two levels down."""
    for path, module in modules.items():
        if path and path.count(".") < 2 and next(module.parameters(), None) is not None:
            yield path


def _parameters(
    path: str, root: Module, stops: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the modules in `root`, except those in the modules `stops`."""
    inside = {id(module) for module in walk(root, stops)}
    for where, module in root.named_modules(prefix=path):
        if id(module) in inside:
            yield from module.named_parameters(prefix=where, recurse=False)


def _keep_together(parts: Sequence[Part]) -> None:
    """Put tensors that share memory into one part, the first that has one of them; each tensor
    once.
    """
    owner: dict[int, Part] = {}
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


def _add_aliases(parts: Sequence[Part], aliases: Iterable[torch.Tensor]) -> None:
    """Put each alias into the part of the first tensor in its storage, and name it after that
    tensor.
    """
    first = {
        start_of(tensor): (part, name)
        for part in reversed(parts)
        for name, tensor in reversed(list(part.tensors.items()))
    }
    for number, alias in enumerate(aliases):
        if (known := first.get(start_of(alias))) is not None:
            part, name = known
            part.tensors[f"{name}.alias{number}"] = alias
