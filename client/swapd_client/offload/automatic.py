"""Chooses the components of a model when the caller names none. Pure: looks at names and sizes.

Components run in turns, as an encoder before a decoder. Modules that alternate within a request
must stay one component, or each step could load them again: the blocks of a stack, an LLM and its
head, the halves of T5. So these are components:

1. Modules with a usual name.
2. Models whose config has another `model_type` than the config around it, such as Llava's tower.
3. The largest other modules, if the named ones leave more than a fifth and the model has no config.

Names mislead: a `transformer` may be one block of a hundred. So nothing inside a component or a
list of blocks is a component, and a single part needs a usual name. If the parts leave out more
than a fifth of the bytes, the whole model is one component; with a usual name and no config, if
they leave out half, since people write settings for these names.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch.nn import Module, ModuleDict, ModuleList, Parameter, ParameterDict, ParameterList
from torch.nn.parameter import UninitializedParameter

from swapd_client.memory.movable import nbytes_of

DITS = ("transformer", "transformer_2", "dit", "unet")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")
VAES = ("vae",)
#: These run at every step of a DiT: if they alternated with it, each step would load both.
BESIDE_DITS = ("controlnet", "adapter", "motion_adapter")
#: These are components, however small.
USUAL = (
    *("thinker", "talker", "code2wav", "token2wav"),
    *("visual", "audio_tower", "language_model"),
    *DITS,
    *ENCODERS,
    *VAES,
)
#: These are components if they are large enough and there is another part.
LESSER = (
    *("vision_tower", "vision_model", "vision_encoder", "image_tower", "video_tower"),
    *("text_model", "text_decoder", "audio_model", "audio_encoder", "speech_encoder"),
    *("mask_decoder", "prompt_encoder", "qformer", "t2u_model", "vocoder", "codec_model"),
    *("controlnet", "prior", "movq", "vqvae", "audio_vae"),
)
NAMES = (*USUAL, *LESSER)
#: torch never calls these: the module around them calls, or reads, their contents.
CONTAINERS = (ModuleList, ModuleDict, ParameterList, ParameterDict)

#: Share of a model that may be in no component without further search, or a warning.
MAY_STAY = 0.2
#: With a usual name and without a config, the parts must cover this share.
_MOST = 0.5
#: A part below both limits is no component.
_LEAST = 0.01
_LEAST_BYTES = 256 << 20
#: Smallest share of the model for rule 3.
_LARGE = 0.05


def parts_of(root: Module) -> dict[str, Module]:
    """Return the components of a model by path; empty if the whole model is one component."""
    parts = _Parts(root)
    found = dict(parts.named(root, "", ""))
    if len(found) < 2 and not has_usual(found):
        return {}
    enough = 1 - MAY_STAY
    if not _model_type(root):
        if parts.share(found.values()) < enough:
            found |= parts.largest(root, "", {id(part) for part in found.values()})
        if has_usual(found):
            enough = _MOST  # `private.py` warns of the rest
    return found if parts.share(found.values()) >= enough else {}


def has_usual(paths: Iterable[str]) -> bool:
    return any(_last(path) in USUAL for path in paths)


def children_of(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    return ((f"{path}.{name}".lstrip("."), child) for name, child in module.named_children())


def _sizes(module: Module, sizes: dict[int, int], seen: set[int]) -> int:
    """Fill `sizes` with each module's bytes, by id. A tied parameter counts at its first place."""
    if id(module) in sizes:
        return 0
    nbytes = sum(_nbytes(p, seen) for p in module._parameters.values() if p is not None)
    nbytes += sum(_sizes(child, sizes, seen) for child in module.children())
    sizes[id(module)] = nbytes
    return nbytes


class _Parts:
    def __init__(self, root: Module) -> None:
        self._sizes: dict[int, int] = {}
        self._total = _sizes(root, self._sizes, set())
        self._least = min(_LEAST * self._total, _LEAST_BYTES)

    def share(self, parts: Iterable[Module]) -> float:
        seen: set[int] = set()
        held = sum(_nbytes(p, seen) for part in parts for p in part.parameters())
        return held / self._total if self._total else 1.0

    def named(self, module: Module, path: str, around: str) -> Iterator[tuple[str, Module]]:
        """Yield the outermost modules that are components by name or config.

        `around`: the model type of the module around `module`.
        """
        if isinstance(module, ModuleList):
            return
        around = _model_type(module) or around
        for where, child in children_of(module, path):
            name = _last(where)
            if isinstance(child, CONTAINERS) or not self._may_be_one(child, name):
                yield from self.named(child, where, around)
            elif name in USUAL:
                yield where, child
            elif name in LESSER or _model_type(child) not in ("", around):
                if self._sizes[id(child)] >= self._least:
                    yield where, child
            else:
                yield from self.named(child, where, around)

    def _may_be_one(self, module: Module, name: str) -> bool:
        """Return False for nearly the whole model: what is around it is a mere wrapper."""
        return name in USUAL or self._total - self._sizes[id(module)] >= _LEAST * self._total

    def largest(self, module: Module, path: str, inside: set[int]) -> dict[str, Module]:
        found: dict[str, Module] = {}
        for where, child in children_of(module, path):
            if id(child) in inside or isinstance(child, ModuleList):
                continue
            if isinstance(child, CONTAINERS) or any(id(m) in inside for m in child.modules()):
                found |= self.largest(child, where, inside)
            elif child._modules and self._sizes[id(child)] >= _LARGE * self._total:
                found[where] = child
        return found


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _nbytes(parameter: Parameter, seen: set[int]) -> int:
    if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
        return 0
    seen.add(id(parameter))
    return nbytes_of(parameter)


def _model_type(module: Module) -> str:
    with suppress(Exception):  # a config may be anything
        said = getattr(module.config, "model_type", "")
        return said if isinstance(said, str) else ""
    return ""
