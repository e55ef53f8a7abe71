"""One entry of the zoo: how a class is built and run, and what must come of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

_TRANSFORMERS = ("transformers.modeling_layers", "transformers.generation.utils")
_DIFFUSERS = ("diffusers.models.modeling_utils", "diffusers.pipelines.pipeline_utils")

#: In the order of the table; each is a module of this package, and what it needs is imported once.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "text": _TRANSFORMERS,
    "vision": _TRANSFORMERS,
    "audio": _TRANSFORMERS,
    "multimodal": _TRANSFORMERS,
    "diffusion": (*_TRANSFORMERS, *_DIFFUSERS),
    "quantised": (*_TRANSFORMERS, "torchao.quantization"),
    "adapters": (*_TRANSFORMERS, *_DIFFUSERS, "peft"),
}


class Subject(NamedTuple):
    """A model, or a pipeline, and what is done with it: any nest of tensors comes out."""

    model: Any
    run: Callable[[], Any]
    #: `run` needs gradients, so that it is held by `attachment.use` from forward to backward.
    training: bool = False


@dataclass(frozen=True)
class Entry:
    """One class, in a reduced configuration and with random weights."""

    family: str
    name: str
    #: What of its structure is odd.
    oddity: str
    #: Called in a process of its own, with the random number generators seeded.
    build: Callable[[], Subject]
    #: `make test` runs it; `make zoo` runs all.
    often: bool = False
    #: Its blocks, where they are of several classes and have to be named.
    blocks: tuple[str, ...] = ()
    #: By stage, where it is refused, or dies of what it does: a part of what is said.
    said: Mapping[str, str] = field(default_factory=dict)
    #: A part of what attaching it has to say, in its summary or in a warning.
    told: str = ""


ZOO: dict[str, Entry] = {}


def entry(
    name: str,
    oddity: str,
    *,
    often: bool = False,
    blocks: tuple[str, ...] = (),
    said: Mapping[str, str] | None = None,
    told: str = "",
) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Put what this decorates into the zoo."""

    def enter(build: Callable[[], Subject]) -> Callable[[], Subject]:
        family = build.__module__.rpartition(".")[2]
        assert name not in ZOO, name
        ZOO[name] = Entry(family, name, oddity, build, often, blocks, said or {}, told)
        return build

    return enter


def all_entries() -> list[Entry]:
    """By family, each in the order of its file. Imports none of the libraries."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
    families = list(FAMILIES)
    return sorted(ZOO.values(), key=lambda one: families.index(one.family))
