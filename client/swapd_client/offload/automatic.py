"""Which modules of a model are its components, where nobody says. Pure: looks at names and sizes.

What is taken apart should run in turns: an encoder once, then a decoder for each token. What
alternates many times in a request is to stay one component: the blocks of a stack, an LLM and its
head, the encoder and the decoder of one transformer. Where there is no room for both, each step
would copy them in. So these are components:

1. What has a usual name.
2. What is a model of its own: its config has another `model_type` than the one around it. So
   authors of models say it: of T5 neither half has, of Llava the tower and the language model do.
3. Where names leave more than a fifth, and no config says anything: the largest of the rest.

Names mislead: a `transformer` may be one block of a hundred. So nothing in a component, or in a
list of blocks, is one. A single part that only its config or a lesser name speaks for is none; and
if more than a fifth is in no part, the model is one component. Where there are usual names and no
config, that is half: people give settings for these names.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch.nn import Module, ModuleDict, ModuleList, Parameter, ParameterDict, ParameterList
from torch.nn.parameter import UninitializedParameter

DITS = ("transformer", "transformer_2", "dit", "unet")
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")
VAES = ("vae",)
#: Run at every step of a DiT: taking turns with it would cost a copy at each.
BESIDE_DITS = ("controlnet", "adapter", "motion_adapter")
#: A part with one of these names is a component, however small.
USUAL = (
    *("thinker", "talker", "code2wav", "token2wav"),
    *("visual", "audio_tower", "language_model"),
    *DITS,
    *ENCODERS,
    *VAES,
)
#: With one of these, if it is large enough, and there is another.
LESSER = (
    *("vision_tower", "vision_model", "vision_encoder", "image_tower", "video_tower"),
    *("text_model", "text_decoder", "audio_model", "audio_encoder", "speech_encoder"),
    *("mask_decoder", "prompt_encoder", "qformer", "t2u_model", "vocoder", "codec_model"),
    *("controlnet", "prior", "movq", "vqvae", "audio_vae"),
)
NAMES = (*USUAL, *LESSER)
#: These are never called: whoever holds them calls, or reads, what is in them.
CONTAINERS = (ModuleList, ModuleDict, ParameterList, ParameterDict)

#: What may be in no component without more being looked for, or a warning: a share of the model.
MAY_STAY = 0.2
#: Usual names say something about a model without a config if they name this share of it.
_MOST = 0.5
#: A part that is smaller than both is not worth the chunk that it would take.
_LEAST = 0.01
_LEAST_BYTES = 256 << 20
#: The largest of the rest have this share of the model at least.
_LARGE = 0.05


def parts_of(root: Module) -> dict[str, Module]:
    """The modules of a model that are components, by path; none: the model is one component."""
    parts = _Parts(root)
    found = dict(parts.named(root, "", ""))
    if len(found) < 2 and not has_usual(found):
        return {}
    enough = 1 - MAY_STAY
    if not _model_type(root):
        if parts.share(found.values()) < enough:
            found |= parts.largest(root, "", {id(part) for part in found.values()})
        if has_usual(found):
            enough = _MOST  # of the rest there is a warning
    return found if parts.share(found.values()) >= enough else {}


def has_usual(paths: Iterable[str]) -> bool:
    """Whether one of these has a usual name."""
    return any(_last(path) in USUAL for path in paths)


def children_of(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    """What is in a module, by path."""
    for name, child in module._modules.items():
        if child is not None:
            yield (f"{path}.{name}" if path else name), child


class Sizes:
    """Bytes of the parameters in each module of a model; what is tied counts where it is first."""

    def __init__(self, root: Module) -> None:
        self._of: dict[int, int] = {}
        self._seen: set[int] = set()
        self._measure(root)

    def of(self, module: Module) -> int:
        return self._of[id(module)]

    def _measure(self, module: Module) -> int:
        if id(module) in self._of:
            return 0
        self._of[id(module)] = 0  # until it is known: it may be in itself
        own = [p for p in module._parameters.values() if p is not None]
        nbytes = sum(_nbytes(parameter, self._seen) for parameter in own)
        nbytes += sum(self._measure(child) for _, child in children_of(module, ""))
        self._of[id(module)] = nbytes
        return nbytes


class _Parts:
    """Looks for the parts of one model."""

    def __init__(self, root: Module) -> None:
        self._sizes = Sizes(root)
        self._total = self._sizes.of(root)
        self._least = min(_LEAST * self._total, _LEAST_BYTES)

    def share(self, parts: Iterable[Module]) -> float:
        """How much of the model is in these."""
        seen: set[int] = set()
        held = sum(_nbytes(p, seen) for part in parts for p in part.parameters())
        return held / self._total if self._total else 1.0

    def named(self, module: Module, path: str, around: str) -> Iterator[tuple[str, Module]]:
        """The outermost that a name or a config speaks for. `around`: the model type there."""
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
                if self._sizes.of(child) >= self._least:
                    yield where, child
            else:
                yield from self.named(child, where, around)

    def _may_be_one(self, module: Module, name: str) -> bool:
        """Not if the rest is next to nothing: then it is a wrapper around the model."""
        return name in USUAL or self._total - self._sizes.of(module) >= _LEAST * self._total

    def largest(self, module: Module, path: str, inside: set[int]) -> dict[str, Module]:
        """Those beside `inside` that are more than one layer."""
        found: dict[str, Module] = {}
        for where, child in children_of(module, path):
            if id(child) in inside or isinstance(child, ModuleList):
                continue
            if isinstance(child, CONTAINERS) or any(id(m) in inside for m in child.modules()):
                found |= self.largest(child, where, inside)
            elif child._modules and self._sizes.of(child) >= _LARGE * self._total:
                found[where] = child
        return found


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _nbytes(parameter: Parameter, seen: set[int]) -> int:
    if id(parameter) in seen or isinstance(parameter, UninitializedParameter):
        return 0
    seen.add(id(parameter))
    return parameter.nbytes


def _model_type(module: Module) -> str:
    with suppress(Exception):  # a config may be anything
        said = getattr(module.config, "model_type", "")
        return said if isinstance(said, str) else ""
    return ""
