"""What a stage has in swapd: its components, how they are registered, and what each call needs.

Lives here: names. Which weights are which component is said by `parts.py`, and when they are leased
by `turns.py`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import DuplicateName
from swapd_client.vllm.parts import Part
from swapd_client.vllm.stage.cache import Cache, Terms

log = logging.getLogger("swapd_client")


class StageComponents:
    """The components that a stage has registered; none at first."""

    def __init__(self) -> None:
        #: What every call needs, and what one needs that has encoder inputs: the same object if
        #: that is nothing more.
        self.main: tuple[str, ...] = ()
        self.all: tuple[str, ...] = ()
        #: By component, its parameters.
        self.tensors: Mapping[str, Mapping[str, torch.Tensor]] = {}
        #: The KV cache, if it takes turns with the weights.
        self.cache: Cache | None = None
        #: Registers all of it with another client, where it is. None: there is nothing yet.
        self.register_again: Callable[[Client], None] | None = None

    def register(self, client: Client, parts: Iterable[Part]) -> int:
        """Move `parts` into swapd; how many bytes were moved. All of them or none.

        Blocks for the copies. Raises as `Client.register`.
        """
        parts = tuple(parts)
        done: list[str] = []
        try:
            for part in parts:
                client.register(part.name, part.tensors, policy=part.policy)
                done.append(part.name)
        except BaseException as exc:
            for name in done:
                client.unregister(name)
            if isinstance(exc, DuplicateName):
                raise DuplicateName(
                    f"{exc}. Give this stage a name of its own: additional_config: "
                    "{swapd: {component: ...}}"
                ) from exc
            raise
        self.tensors = {part.name: part.tensors for part in parts}
        self.register_again = partial(_register_again, parts)
        self.main = tuple(part.name for part in parts if not part.encoder)
        self.all = tuple(done) if len(done) > len(self.main) else self.main
        sizes = {name: client.session.own(name).nbytes for name in done}
        said = ", ".join(f"{p.name} ({size(sizes[p.name])}) {_in_words(p)}" for p in parts)
        log.info("in swapd at %s: %s", client.session.endpoint, said)
        return sum(sizes.values())

    def lend_cache(self, client: Client, name: str, nbytes: int, terms: Terms) -> torch.Tensor:
        """Have a KV cache of so many bytes take turns with the weights: where it is, zeros.

        Raises as `Client.register_scratch`.
        """
        assert self.register_again is not None
        cache = self.cache = Cache(
            client.register_scratch(name, nbytes, mutable=terms.saved), terms
        )
        weights = self.register_again

        def register_again(client: Client) -> None:
            weights(client)
            cache.register_again(client)

        self.register_again = register_again
        alike = self.all is self.main
        self.main = (*self.main, name)
        self.all = self.main if alike else (*self.all, name)
        log.info("in swapd: %s (%s) takes turns, %s", name, size(nbytes), terms)
        return cache.component.tensor

    def take_back(self, client: Client) -> None:
        """Have all of it in private memory again. Raises as `Client.unregister`."""
        self.register_again = None
        for name in list(client.session.components):
            client.unregister(name)

    def nbytes(self, client: Client) -> int:
        """How much they are in swapd."""
        return sum(client.session.own(name).nbytes for name in self.tensors)


def _register_again(parts: Iterable[Part], client: Client) -> None:
    client._register_again({part.name: (part.tensors, part.policy) for part in parts})


def _in_words(part: Part) -> str:
    if part.policy == "permanent":
        return "stays"
    when = "comes for steps with encoder inputs" if part.encoder else "takes turns"
    return f"{when} and leaves at once" if part.policy == "sequential" else when
