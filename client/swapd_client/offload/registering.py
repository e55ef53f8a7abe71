"""Moves a model's weights into swapd: each piece as one component, or as a family of blocks."""

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Module, ModuleList

from swapd.shared import protocol
from swapd_client.errors import DuplicateName, InvalidSource, TooLarge
from swapd_client.memory import dlpack
from swapd_client.memory.tensors import Buffers, nbytes_of
from swapd_client.offload import find, training
from swapd_client.offload.blocks import blocks_of, finer
from swapd_client.offload.find import Found, Ownership, Piece
from swapd_client.offload.lender import Lender
from swapd_client.offload.strategy import How
from swapd_client.offload.stream import Stream

log = logging.getLogger("swapd_client")

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Streamed:
    """A streamed component: its stream and its blocks."""

    stream: Stream
    #: The modules of each part of the stream.
    blocks: tuple[tuple[Module, ...], ...]


class Registering:
    """Registers the new pieces of a model; all of them, or none."""

    def __init__(
        self,
        client: Lender,
        owned: Ownership,
        hows: Mapping[str, How],
        called: Callable[[str], str],
    ) -> None:
        """`called(name)`: the name of a piece in the daemon."""
        self._client = client
        self._owned = owned
        self._hows = hows
        self._called = called
        self._group = f"attach {client.session.welcome.session}.{next(_numbers)}"
        #: By piece: the names of its components.
        self.names_of: dict[Piece, list[str]] = {}
        self.streamed: dict[str, Streamed] = {}

    def run(
        self,
        found: Sequence[Found],
        blocks: Mapping[str, Sequence[str]],
        stops: Iterable[int],
        trained: training.Trained,
    ) -> None:
        """Register all pieces.

        `blocks`: by component, the paths of its blocks. `stops`: modules that begin another
        component. `trained`: parameters that stay private. Blocks for the copies. Raises as
        `Client.register` and `register_family`.
        """
        by_name = {one.name: one for one in found}
        gpu = self._client.session.processor.index
        target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        # as with module.to(): they stay private, on the device that computes with the weights
        buffers = Buffers(ModuleList(one.module for one in found), target)
        buffers.copy()
        try:
            for piece in self._owned.pieces.values():
                self._one(piece, by_name.get(piece.name), blocks.get(piece.name), stops)
        except BaseException as exc:
            self.take_back()
            if isinstance(exc, DuplicateName):
                raise DuplicateName(
                    f"{exc}. Give this model's components names of their own: attach(..., "
                    "prefix=...)"
                ) from exc
            raise
        buffers.replace()
        training.move(trained, target.device)

    def take_back(self) -> None:
        """Move all that was registered here back into private memory."""
        while self.names_of:
            _, names = self.names_of.popitem()
            for name in reversed(names):
                self._client.unregister(name)

    @property
    def names(self) -> list[str]:
        """All names that were registered here, in order."""
        return [name for names in self.names_of.values() for name in names]

    def _how(self, piece: Piece) -> How:
        parts = self._owned.made_of.get(piece.name)
        if parts is None:
            return self._shared(piece)
        if any(isinstance(part, str) for part in parts):
            return How()  # it joins components that may be in a group, or streamed
        return self._hows[piece.name]

    def _shared(self, piece: Piece) -> How:
        """A shared piece is sequential if all its users are, and permanent if one is."""
        users = [self._hows[one] for one, parts in self._owned.made_of.items() if piece in parts]
        if all(how.policy == "sequential" for how in users):
            return How("sequential")
        return How("permanent") if any(how.policy == "permanent" for how in users) else How()

    def _one(
        self, piece: Piece, one: Found | None, named: Sequence[str] | None, stops: Iterable[int]
    ) -> None:
        """Register a piece: in blocks if it is to be streamed, or does not fit whole."""
        how = self._how(piece)
        if how.streamed and one is not None and self._in_blocks(piece, how, one, named, stops):
            return
        try:
            self._whole(piece, how)
        except TooLarge as exc:
            # not if parts of the component are registered already, nor if it never leaves
            may = how is self._hows.get(piece.name) and how.policy != "permanent"
            if one is None or not may:
                raise
            if not self._in_blocks(piece, how, one, named, stops):
                raise TooLarge(
                    f"{exc}. No list of blocks holds most of it, so it cannot be streamed: "
                    f"{finer([find.bare(one.module)], self._room(piece.tensors))}"
                ) from exc
            log.warning("%s. Until then it is streamed block by block", exc)
        else:
            if how.streamed:
                log.warning(
                    "%r has no list of blocks that holds most of it: it is not streamed. "
                    "Name its blocks in blocks=",
                    piece.name,
                )

    def _whole(self, piece: Piece, how: How) -> None:
        called = self._called(piece.name)
        self._client.register(
            called,
            piece.tensors,
            policy=how.policy,
            group=self._group if how.exclusive else None,
            part_of=self._called(how.part_of) if how.part_of else "",
        )
        self.names_of[piece] = [called]

    def _room(self, *parts: Mapping[str, torch.Tensor]) -> int:
        """The bytes of the device that these take, each by itself."""
        chunk = self._client.session.welcome.chunk_bytes
        sizes = (sum(nbytes_of(tensor) for tensor in part.values()) for part in parts)
        return sum(-(-nbytes // chunk) * chunk for nbytes in sizes)

    def _in_blocks(
        self,
        piece: Piece,
        how: How,
        one: Found,
        named: Sequence[str] | None,
        stops: Iterable[int],
    ) -> bool:
        """Register a piece block by block; False if it has no blocks."""
        least = self._client.session.welcome.chunk_bytes
        blocks = blocks_of(find.bare(one.module), named, least)
        modules = [module for block in blocks for module in block.modules]
        if (outer := find.compiled_around(one.module, modules)) is not None:
            raise InvalidSource(
                f"{one.name!r} cannot be streamed: the {type(find.bare(outer)).__name__} around "
                "its blocks is compiled as one, and would run without their hooks. Compile the "
                "blocks instead"
            )
        rest, parts = find.by_block(piece, one.module, [block.modules for block in blocks], stops)
        full = [(block, part) for block, part in zip(blocks, parts, strict=True) if part]
        if not full:
            return False
        family = self._called(piece.name)
        try:
            made = self._client.register_family(
                family,
                ({protocol.REST: rest} if rest else {})
                | {block.name: part for block, part in full},
                policy=how.policy,
                group=self._group if how.exclusive else None,
                resident=how.resident,
            )
        except TooLarge as exc:
            block, part = max(full, key=lambda one: one[0].nbytes)
            raise TooLarge(
                f"{exc}. Each block must fit, and {block.name!r} does not: "
                f"{finer(block.modules, self._room(rest, part))}"
            ) from exc
        names = self.names_of[piece] = [component.name for component in made]
        stream = Stream(self._client, family, names[0] if rest else None, names[1 if rest else 0 :])
        self.streamed[one.name] = Streamed(stream, tuple(block.modules for block, _ in full))
        return True


def stream_of(client: Lender, one: Found, names: Sequence[str]) -> Streamed | None:
    """How to stream a component registered or loaded as a family; None if that is impossible.

    `names`: its components. Its blocks are the outermost modules whose tensors are all in one part.
    If a part has tensors outside of them, no call would show when it is needed: None.
    """
    session = client.session
    families = {session.own(name).part_of for name in names} - {""}
    if len(families) != 1:
        return None
    family = families.pop()
    parts = session.registry.family(family)
    rest = protocol.rest_of(family)
    numbers = {name: number for number, name in enumerate(p for p in parts if p != rest)}
    blocks: list[list[Module]] = [[] for _ in numbers]
    waiting = [find.bare(one.module)]
    while waiting:
        module = waiting.pop(0)
        within = {
            _part_of(client, tensor, parts) for m in module.modules() for tensor in find.bytes_of(m)
        } - {""}  # private tensors are always there
        if len(within) == 1 and within <= numbers.keys() and find.is_called(module):
            blocks[numbers[within.pop()]].append(module)
            continue
        if any(_part_of(client, tensor, parts) in numbers for tensor in find.bytes_of(module)):
            return None
        waiting += module.children()
    if not all(blocks):
        return None
    if find.compiled_around(one.module, itertools.chain(*blocks)) is not None:
        return None
    stream = Stream(client, family, rest if rest in parts else None, list(numbers))
    return Streamed(stream, tuple(map(tuple, blocks)))


def _part_of(client: Lender, tensor: torch.Tensor, parts: Sequence[str]) -> str:
    """The one of `parts` that has a tensor's bytes, or ""."""
    span = find.span_of(tensor)
    for part in map(client.session.own, parts):
        if span is not None and 0 <= span[0] - part.address < part.nbytes:
            return part.name
    return ""
