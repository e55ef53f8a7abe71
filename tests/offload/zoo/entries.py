"""One entry of the zoo: how to build and run a class, and the expected results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

_TRANSFORMERS = ("transformers.modeling_layers", "transformers.generation.utils")
_DIFFUSERS = ("diffusers.models.modeling_utils", "diffusers.pipelines.pipeline_utils")

#: In the order of the table; each is a module of this package, imported once with its libraries.
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
    """A model, or a pipeline, and a run of it, whose result is any nest of tensors."""

    model: Any
    run: Callable[[], Any]
    #: `run` needs gradients, so that it is held by `attachment.use` from forward to backward.
    training: bool = False


@dataclass(frozen=True)
class Entry:
    """One class, in a reduced configuration and with random weights."""

    family: str
    name: str
    #: The oddity of its structure.
    oddity: str
    #: Called in a process of its own, with the random number generators seeded.
    build: Callable[[], Subject]
    #: `make test` runs it; `make zoo` runs all.
    often: bool = False
    #: The paths of its blocks, if they are of several classes.
    blocks: tuple[str, ...] = ()
    #: By stage in which it is refused or crashes: a part of the expected message.
    said: Mapping[str, str] = field(default_factory=dict)
    #: A part of the summary or warning that attaching it must give.
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
    """Adds the decorated function to the zoo."""

    def enter(build: Callable[[], Subject]) -> Callable[[], Subject]:
        family = build.__module__.rpartition(".")[2]
        assert name not in ZOO, name
        ZOO[name] = Entry(family, name, oddity, build, often, blocks, said or {}, told)
        return build

    return enter


def of_transformers(
    family: str,
    name: str,
    oddity: str,
    run: Callable[[Any], Any],
    sizes: Mapping[str, Any],
    **told: Any,
) -> None:
    """Adds a class of transformers, built from its configuration alone, to the zoo.

    `run(model)`: one run. `sizes`: of the configuration. `told`: as for `entry`.
    """

    def build() -> Subject:
        import transformers

        kind = getattr(transformers, name)
        model = kind(kind.config_class(**sizes))
        return Subject(model, lambda: run(model))

    build.__module__ = f"{__package__}.{family}"
    entry(name, oddity, **told)(build)


def all_entries() -> list[Entry]:
    """By family, each in the order of its file. Imports none of the libraries."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
    families = list(FAMILIES)
    return sorted(ZOO.values(), key=lambda one: families.index(one.family))
