"""A diffusion pipeline's weights in swapd: its components, and how they share the GPU."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import msgspec
from torch import Tensor
from torch.nn import Module

from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import (
    DuplicateName,
    InvalidArgument,
    SessionEnded,
    SessionFenced,
    TooLarge,
)
from swapd_client.log import log
from swapd_client.offload import search
from swapd_client.offload.arguments import Arguments, checked
from swapd_client.offload.attach import attach
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.registering import ToSource
from swapd_client.offload.scope import kept_between_calls
from swapd_client.offload.strategy import Kind
from swapd_client.vllm.options import Options
from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.room import check_others

#: In `cpu_offload_components`: the whole pipeline, as one component.
WHOLE = "."

_IN_WORDS = {
    "off": "swapd loads each for its calls, and evicts it when others need the memory",
    "alternating": "one is on the GPU at a time, and stays until another is called",
    "sequential": "each is loaded for a call and leaves after it",
    "model": "DiTs and encoders take turns, and decoders stay",
    "layerwise": "swapd loads DiTs block by block, and others whole for their calls",
    "partial": "cpu_offload_gb stays on the host, and is loaded block by block",
}


_PRIVATE = ("_encode", "_decode")


class Components:
    """Each component by itself, loaded by hooks around its calls."""

    def __init__(
        self,
        stage: Stage,
        options: Options,
        pipeline: Module,
        kinds: Mapping[str, Kind],
        source: ToSource = dict,
    ) -> None:
        """Move the weights into swapd. Blocks for the copies. `source`: as of `attach`.

        Raises: InvalidArgument, and as `Client.attach`; then the pipeline is unchanged.
        """
        self._stage = stage
        self._options = options
        self._pipeline = pipeline
        self._found = found = _components(pipeline, kinds)
        _warn_of_absent(stage.name, options, found)
        names = list(found) or [WHOLE]
        self._stay = stay = _stay(stage.name, names, options)
        # the next daemon gets them from private memory: a model has one client's hooks at a time
        stage.connection.wait_s = 0.0
        self._attachment = self._attach(stage.client, source)
        try:
            session = stage.client.session.welcome.session
            check_others(stage.client.status(), session, stage.name)
        except BaseException:
            self._attachment.detach()
            raise
        stage.components.register_again = self._attach_again
        self.nbytes = sum(one.nbytes for one in self._attachment.components.values())
        said = "" if stay == names else f"; {_IN_WORDS[options.offload.mode]}"
        if stay:
            said += f"; on the GPU for good, once loaded: {', '.join(stay)}"
        log.info("%s has %s in swapd%s", stage.name, size(self.nbytes), said)

    @contextmanager
    def request(self) -> Iterator[None]:
        """In the block, a component that a call has loaded stays until another one is called.

        Once others may have its memory, it stays for `finish_within_s` at most.
        """
        with self._stage.computing():
            if (error := self._stage.client.session.error) is not None:
                self._stage.turns.go_alone(error)
            with kept_between_calls(self._stage.client, self._options.finish_within_s):
                yield

    def around(self, module: Module) -> Module | None:
        """Return the module to hold for a single call of `module`."""
        for one in self._attachment.components.values():
            if module in set(one.module.modules()):
                blocks = [block for block in one.blocks if module in set(block.modules())]
                return blocks[0] if blocks else module if one.blocks else one.module
        return None

    def hold(self, what: Module | None) -> AbstractContextManager[object]:
        return nullcontext() if what is None else self._attachment.use(what)

    def take_back(self) -> None:
        self._stage.components.register_again = None
        self._attachment.detach()

    def _attach(self, client: Client, source: ToSource = dict) -> Attachment:
        names = list(self._found) or [WHOLE]
        all_stay = self._stay == names
        offload = self._options.offload
        arguments = Arguments(
            names,
            settings=None if offload.mode == "off" else offload,
            prefix=self._stage.name,
            policy="permanent" if all_stay else "lru",
            wrap_methods=_methods(self._found),
            kinds={name: one.kind for name, one in self._found.items()},
            stay=[] if all_stay else self._stay,
            trainable=False,
        )
        try:
            attachment = attach(client, self._pipeline, checked(arguments, {}), source)
        except DuplicateName as exc:
            raise DuplicateName(
                f"{exc.__cause__ or exc}. Give this stage a name of its own: additional_config: "
                "{swapd: {component: ...}}"
            ) from exc
        except TooLarge as exc:
            raise TooLarge(
                f"{exc.__cause__ or exc}. A component that does not fit is streamed if a list of "
                "blocks has most of its weights, and each block fits"
            ) from exc
        client.when_gone = partial(self._gone, client)
        return attachment

    def _attach_again(self, client: Client) -> None:
        self._attachment = self._attach(client)

    def _gone(self, client: Client, error: SessionEnded) -> None:
        """Called in a request. Raises `error` if the results so far may be wrong."""
        if client is not self._stage.client:
            return  # compiled code may call hooks of an earlier client
        self._stage.turns.go_alone(error)
        if isinstance(error, SessionFenced):
            raise error


class WholePipeline:
    def __init__(
        self,
        stage: Stage,
        pipeline: Module,
        outside: Mapping[str, Tensor],
        aliases: Sequence[Tensor],
    ) -> None:
        """Move the weights into swapd. Blocks for the copies. Raises as `StageMemory.take`."""
        self._stage = stage
        self._pipeline = pipeline
        self.nbytes = stage.memory.take({"": pipeline}, outside, aliases)

    def request(self) -> AbstractContextManager[None]:
        return self._stage.using()

    def around(self, module: Module) -> Module:
        return self._pipeline

    def hold(self, what: Module | None) -> AbstractContextManager[None]:
        return self._stage.using()

    def take_back(self) -> None:
        self._stage.memory.take_back()


def as_whole(options: Options, name: str, ranks: int) -> Options | None:
    """Return the options of a stage that is one component; None if it is several.

    Raises: InvalidArgument for settings that do not go with several ranks, or with one component.
    """
    offload = options.offload
    if offload.cpu_offload_components != (WHOLE,):
        if ranks == 1:
            return None
        if offload.cpu_offload_components or offload.mode not in ("off", "alternating"):
            raise InvalidArgument(
                f"{name} runs on {ranks} GPUs, where swapd loads it whole: of the offloading "
                "settings, set cpu_offload_enabled only"
            )
    elif not offload.cpu_offload_enabled:
        raise InvalidArgument(
            f"{name}: cpu_offload_components: ['{WHOLE}'] goes with cpu_offload_enabled: true"
        )
    whole = msgspec.structs.replace(offload, cpu_offload_components=(name,))
    return msgspec.structs.replace(options, offload=whole)


class _Component(NamedTuple):
    module: Module
    kind: Kind


def _components(pipeline: Module, declared: Mapping[str, Kind]) -> dict[str, _Component]:
    """Return the declared components, by name. A list of modules stands for its members.

    A component inside another joins the outer one: a stage that held the one and waited for the
    other could wait for a stage that does the same.
    """
    roots = search.roots_of(pipeline)
    found = [
        (one, kind) for n, kind in declared.items() for one in search.components_of(roots, [n])
    ]
    inner = {id(m) for one, _ in found for m in one.module.modules() if m is not one.module}
    components: dict[str, _Component] = {}
    for one, kind in found:
        if id(one.module) not in inner:
            inner.add(id(one.module))  # a component may be declared twice
            components[one.name] = _Component(one.module, kind)
    return components


def _warn_of_absent(stage: str, options: Options, found: Mapping[str, _Component]) -> None:
    kinds = {one.kind for one in found.values()} if options.offload.mode == "model" else None
    for kind, what in (("dit", "DiT"), ("encoder", "encoder")):
        if kinds is not None and kind not in kinds:
            log.warning(
                "%s: enable_cpu_offload has DiTs and encoders take turns, and no %s is found among "
                "its components: %s",
                stage,
                what,
                ", ".join(found) or "none",
            )


def _stay(stage: str, names: Sequence[str], options: Options) -> list[str]:
    offload = options.offload
    if offload.mode == "off":
        return list(names) if options.offload_said else []
    if (named := offload.cpu_offload_components) is None:
        return []
    for one in named:
        if not any(fnmatchcase(name, one) for name in names):
            raise InvalidArgument(
                f"{stage}: cpu_offload_components names {one!r}; this pipeline has "
                f"{', '.join(names)}, and '{WHOLE}' is the whole pipeline"
            )
    return [name for name in names if not any(fnmatchcase(name, one) for one in named)]


def _methods(found: Mapping[str, _Component]) -> Mapping[str, Sequence[str]] | Sequence[str]:
    if not found:
        return ["forward"]  # vllm-omni calls the pipeline's own
    return {
        name: [method for method in _PRIVATE if callable(getattr(one.module, method, None))]
        for name, one in found.items()
        if one.kind == "vae"
    }
