"""A stage's components in swapd: their registration, and the components of each call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from swapd.shared import vm
from swapd.shared.protocol import REST, part_name
from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import DuplicateName, TooLarge
from swapd_client.log import log
from swapd_client.memory.part import Part
from swapd_client.registration import register_again
from swapd_client.session.session import Session
from swapd_client.vllm import layers
from swapd_client.vllm.kept_content import Content
from swapd_client.vllm.parts import StagePart, Tensors
from swapd_client.vllm.ranks import LossCounts
from swapd_client.vllm.stage.kv_cache import KvTerms, StageCache
from swapd_client.vllm.stage.room import lendable
from swapd_client.vllm.stage.segments import Layers


class StageComponents:
    def __init__(self) -> None:
        #: Components that every call leases, and those that a call with encoder inputs leases; the
        #: same object without encoders.
        self.main: tuple[str, ...] = ()
        self.all: tuple[str, ...] = ()
        self.tensors: Mapping[str, Tensors] = {}
        #: Bytes of the weights.
        self.nbytes = 0
        self._parts: tuple[StagePart, ...] = ()
        #: The KV cache, if it takes turns with the weights.
        self.cache: StageCache | None = None
        #: Bytes of each component or part that a turn holds; of those that stream, of as many as
        #: are loaded at a time.
        self.sizes: list[int] = []
        #: The components in swapd, for the next daemon.
        self._registered: list[Part] = []
        #: Registers all components with another client; None: there are none.
        self.register_again: Callable[[Client], None] | None = None

    def register(
        self, client: Client, parts: Iterable[StagePart], content: Content | None = None
    ) -> int:
        """Move `parts` into swapd, all or none; return the bytes.

        `content`: the name of these weights, if they may be kept. Raises as `Client.register`;
        NotKept if they have no bytes yet, and the daemon has none.
        """
        parts = tuple(parts)
        done: list[str] = []
        sources = [(part, *source) for part in parts for source in part.sources.items()]
        try:
            for part, name, tensors in sources:
                source: Any = tensors
                if content is not None:
                    source = content.layout_of(tensors, len(sources), client.session.processor)
                client.register(name, source, policy=part.policy, part_of=part.family)
                done.append(name)
        except BaseException as exc:
            for name in done:
                client.unregister(name)
            if not isinstance(exc, DuplicateName):
                raise
            raise DuplicateName(
                f"{exc}. Give this stage a name of its own: additional_config: "
                "{swapd: {component: ...}}"
            ) from exc
        self._set(parts)
        self.sizes = [nbytes for part in parts for nbytes in _held(client.session, part)]
        self._registered = list(map(client.session.own, done))
        self.register_again = self._register_again
        of = sizes_of(client.session)
        said = ", ".join(f"{p.name} ({size(of[p.name])}) {_in_words(p)}" for p in parts)
        log.info("in swapd at %s: %s", client.session.endpoint, said)
        self.nbytes = sum(part.nbytes for part in self._registered)
        return self.nbytes

    def _set(self, parts: tuple[StagePart, ...]) -> None:
        self._parts = parts
        self.tensors = {part.name: part.tensors for part in parts}
        held = [part for part in parts if not part.slots]
        self.main = tuple(part.name for part in held if not part.encoder)
        self.all = self.main if len(self.main) == len(held) else tuple(p.name for p in held)

    def lend_cache(
        self, client: Client, name: str, nbytes: int, terms: KvTerms, counts: LossCounts
    ) -> torch.Tensor:
        """Register a KV cache that takes turns with the weights; return its tensor, zeros.

        Raises as `Client.register_scratch`.
        """
        assert self.register_again is not None
        component = client.register_scratch(name, nbytes, mutable=terms.saved)
        cache = self.cache = StageCache(component, terms, counts)
        self.sizes.append(nbytes)
        self._registered.append(client.session.own(name))
        alike = self.all is self.main
        self.main = (name, *self.main)  # first, because the first layer needs it
        self.all = self.main if alike else (name, *self.all)
        log.info("in swapd: %s (%s) takes turns, %s", name, size(nbytes), terms)
        return cache.component.tensor

    def layers(self, models: Mapping[str, Module]) -> Layers:
        return {
            part_name(part.name, key): (layers.modules_of(models, key), tensors)
            for part in self._parts
            for key, tensors in part.layers.items()
            if key != REST and not part.slots
        }

    def streamed(self, models: Mapping[str, Module]) -> tuple[Mapping[str, Sequence[Module]], int]:
        part = next((part for part in self._parts if part.slots), None)
        if part is None:
            return {}, 0
        found = {part_name(part.name, key): layers.modules_of(models, key) for key in part.layers}
        return found, part.slots

    def _register_again(self, client: Client) -> None:
        status = client.status()
        need = sum(vm.round_up(nbytes, status.chunk_bytes) for nbytes in self.sizes)
        if need > (room := lendable(status)):  # though each part alone may fit
            raise TooLarge(
                f"it needs {size(need)} at once, and swapd at {client.session.endpoint} can lend "
                f"{size(room)}: start it with a larger --budget"
            )
        register_again(client.leasing, self._registered)

    @property
    def losses(self) -> int:
        return 0 if self.cache is None else self.cache.losses

    def take_back(self, client: Client) -> None:
        self.register_again = None
        for name in list(client.session.components):
            client.unregister(name)


def sizes_of(session: Session) -> dict[str, int]:
    """Return the bytes of each family, and of each component without a family."""
    sizes: dict[str, int] = {}
    for part in session.registry.all():
        name = part.part_of or part.name
        sizes[name] = sizes.get(name, 0) + part.nbytes
    return sizes


def _held(session: Session, part: StagePart) -> list[int]:
    sizes = [session.own(name).nbytes for name in part.sources]
    return [max(sizes)] * part.slots if part.slots else sizes


def _in_words(part: StagePart) -> str:
    if part.policy == "permanent":
        return "stays"
    if part.slots:
        return f"streams, {part.slots} of {len(part.layers)} layers at a time"
    when = "is loaded for steps with encoder inputs" if part.encoder else "takes turns"
    if part.layers:
        return f"{when} by layers, in {len(part.layers)} parts"
    return f"{when} and leaves at once" if part.policy == "sequential" else when
