"""Moves a model's weights into swapd: each piece as one component, or as a family of blocks."""

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex

import torch
from torch.nn import Module, ModuleList

from swapd.shared import protocol, vm
from swapd_client.errors import DuplicateName, InvalidSource, TooLarge
from swapd_client.log import log
from swapd_client.memory import dlpack
from swapd_client.memory.component import Component
from swapd_client.memory.movable import nbytes_of
from swapd_client.memory.sources import Source
from swapd_client.memory.tensors import Buffers
from swapd_client.offload import ownership, private, search
from swapd_client.offload.blocks import ModelBlock, blocks_of, finer
from swapd_client.offload.holdables import StreamedComponent
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.ownership import Ownership, TensorGroup
from swapd_client.offload.search import ComponentModule
from swapd_client.offload.strategy import Sharing
from swapd_client.offload.stream import Stream
from swapd_client.registration import unregister

#: Makes the source of a component of its tensors.
ToSource = Callable[[Mapping[str, torch.Tensor]], Source]
#: The modules of blocks, by the name of their part in the daemon.
_Blocks = dict[str, tuple[Module, ...]]


@dataclass(eq=False)
class Registration:
    """Registers the new pieces of a model. After an error no piece is registered."""

    client: AttachClient
    owned: Ownership
    hows: Mapping[str, Sharing]
    called: Callable[[str], str]
    #: Modules that begin another component.
    stops: Iterable[int]
    #: What an earlier registration of the model streams.
    before: Mapping[str, StreamedComponent]
    source: ToSource
    #: By piece, so that `_take_back` knows them after an interrupt.
    _made: dict[TensorGroup, list[Component]] = field(default_factory=dict, init=False)
    streamed: dict[str, StreamedComponent] = field(default_factory=dict, init=False)
    #: Blocks that streamed components have got.
    _new: dict[str, _Blocks] = field(default_factory=dict, init=False)
    #: Unique among all processes.
    _group: str = field(default_factory=lambda: f"attach {token_hex(8)}", init=False)

    def run(
        self, found: Sequence[ComponentModule], trained: private.Trained, into: list[str]
    ) -> None:
        """Register all pieces, and add their names to `into`. `trained` parameters stay private.

        Blocks for the copies. Raises as `Client.register` and `register_family`.
        """
        by_name = {one.name: one for one in found}
        gpu = self.client.session.processor.index
        target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        # as after module.to(): private, on the device that computes with the weights
        buffers = Buffers(ModuleList(one.module for one in found), target)
        buffers.copy()
        try:
            for piece in self.owned.pieces.values():
                one = by_name.get(piece.name)
                if one is None or not self._new_blocks(piece, one):
                    self._one(piece, one)
            for one in found:
                self._stream_on(one)
            buffers.replace()
            private.move(trained, target.device)
            into += itertools.chain.from_iterable(map(self.names_of, self._made))
        except BaseException as exc:
            self._take_back()
            if isinstance(exc, DuplicateName):
                raise DuplicateName(
                    f"{exc}. Give this model's components names of their own: attach(..., "
                    "prefix=...)"
                ) from exc
            raise

    def _take_back(self) -> None:
        while self._made:
            _, made = self._made.popitem()
            for component in reversed(made):
                unregister(self.client.leasing, component.name)

    def names_of(self, piece: TensorGroup) -> list[str]:
        return [one.name for one in self._made[piece]]

    def _how(self, piece: TensorGroup) -> Sharing:
        parts = self.owned.made_of.get(piece.name)
        if parts is not None and not any(isinstance(part, str) for part in parts):
            return self.hows[piece.name]
        # shared, or beside parts that may be in a group, or streamed
        users = [self.hows[n] for n, made in self.owned.made_of.items() if piece in made]
        if all(how.policy == "sequential" for how in users):
            return Sharing("sequential")
        stays = any(how.policy == "permanent" for how in users)
        return Sharing("permanent") if stays else Sharing()

    def _one(self, piece: TensorGroup, one: ComponentModule | None) -> None:
        how = self._how(piece)
        if how.streamed and one is not None and self._in_blocks(piece, how, one):
            return
        try:
            self._whole(piece, how)
        except TooLarge as exc:
            # parts registered before cannot be streamed, and a permanent component never leaves
            may = how is self.hows.get(piece.name) and how.policy != "permanent"
            if one is None or not may:
                raise
            if not self._in_blocks(piece, how, one):
                raise TooLarge(
                    f"{exc}. No list of blocks holds most of it, so it cannot be streamed: "
                    f"{finer([search.bare(one.module)], self._room(piece.tensors))}"
                ) from exc
            log.warning("%s. Until then it is streamed block by block", exc)
        else:
            if how.streamed:
                log.warning(
                    "%r has no list of blocks that holds most of it: it is not streamed. "
                    "Name its blocks in blocks=",
                    piece.name,
                )

    def _whole(self, piece: TensorGroup, how: Sharing) -> None:
        called = self.called(piece.name)
        group = self._group if how.is_exclusive else None
        of = self.called(how.part_of) if how.part_of else ""
        self._made.setdefault(piece, []).append(
            self.client.register(
                called, self.source(piece.tensors), policy=how.policy, group=group, part_of=of
            )
        )

    def _room(self, *parts: Mapping[str, torch.Tensor]) -> int:
        chunk = self.client.session.welcome.chunk_bytes
        sizes = (sum(nbytes_of(tensor) for tensor in part.values()) for part in parts)
        return sum(vm.round_up(nbytes, chunk) for nbytes in sizes)

    def _in_blocks(self, piece: TensorGroup, how: Sharing, one: ComponentModule) -> bool:
        least = self.client.session.welcome.chunk_bytes
        blocks = blocks_of(search.bare(one.module), how.blocks, least)
        modules = [module for block in blocks for module in block.modules]
        if (outer := search.compiled_around(one.module, modules)) is not None:
            raise InvalidSource(
                f"{one.name!r} cannot be streamed: the {type(search.bare(outer)).__name__} around "
                "its blocks is compiled as one, and would run without their hooks. Compile the "
                "blocks instead"
            )
        rest, parts = ownership.by_block(
            piece, one.module, [block.modules for block in blocks], self.stops
        )
        full = [(block, part) for block, part in zip(blocks, parts, strict=True) if part]
        if not full:
            return False
        self._family(piece, how, rest, full)
        names = self.names_of(piece)
        kept, names = (names[0], names[1:]) if rest else (None, names)
        stream = Stream(self.client, self.called(piece.name), kept, names)
        self.streamed[one.name] = StreamedComponent(stream, tuple(b.modules for b, _ in full))
        return True

    def _left(self, one: ComponentModule) -> _Blocks:
        """Return the blocks that are streamed, and that the component still has."""
        before, here = self.before[one.name], set(one.module.modules())
        named = zip(before.stream.parts, before.blocks, strict=True)
        known = self.client.session.components
        return {p: modules for p, modules in named if p in known and not here.isdisjoint(modules)}

    def _used(self, one: ComponentModule) -> list[str]:
        """Return the parts of what was streamed that the component still uses."""
        before, used = self.before.get(one.name), self.owned.made_of[one.name]
        return [part for part in before.stream.everything if part in used] if before else []

    def _new_blocks(self, piece: TensorGroup, one: ComponentModule) -> bool:
        """Register blocks that a streamed component has got, and take them out of `piece`.

        Returns whether that was all of it.
        """
        if not (used := self._used(one)):  # another module
            return False
        session, family = self.client.session, self.before[one.name].stream.family
        old = set(itertools.chain.from_iterable(self._left(one).values()))
        least, given = session.welcome.chunk_bytes, self.hows[one.name].blocks
        blocks = blocks_of(search.bare(one.module), given, least)
        new = [block for block in blocks if old.isdisjoint(block.modules)]
        rest, parts = ownership.by_block(
            piece, one.module, [block.modules for block in new], self.stops
        )
        found = {
            self._free(family, block.name): (block.modules, part)
            for block, part in zip(new, parts, strict=True)
            if part
        }
        if not found:
            return False
        alike = session.own(used[0])
        self._made[piece] = self.client.register_family(
            family,
            {name: part for name, (_, part) in found.items()},
            policy=alike.policy,
            group=alike.group,
            mutable=alike.mutable,
            resident=session.registry.kept.get(family),
        )
        piece.tensors = rest
        self._new[one.name] = {
            protocol.part_name(family, name): modules for name, (modules, _) in found.items()
        }
        return not rest

    def _free(self, family: str, block: str) -> str:
        names = itertools.chain([block], (f"{block}~{n}" for n in itertools.count(2)))
        known = self.client.session.components
        return next(name for name in names if protocol.part_name(family, name) not in known)

    def _stream_on(self, one: ComponentModule) -> None:
        """Go on streaming what was streamed before, with its new blocks and without lost ones."""
        if one.name in self.streamed or one.name not in self.before:
            return
        before, blocks = self.before[one.name], self._left(one)
        if len(blocks) < len(before.blocks) or one.name in self._new:
            place = {module: number for number, module in enumerate(one.module.modules())}
            if not (blocks := blocks | self._new.get(one.name, {})):
                return
            names = sorted(blocks, key=lambda p: min(place[m] for m in blocks[p] if m in place))
            family, rest = before.stream.family, before.stream.rest
            stream = Stream(self.client, family, rest, names, has_lost=True)
            before = StreamedComponent(stream, tuple(blocks[name] for name in names))
        self.streamed[one.name] = before

    def size_again(self) -> None:
        """Keep as much as before of families whose lost blocks are unregistered by now."""
        leasing, kept = self.client.leasing, self.client.session.registry.kept
        for name, streamed in self.streamed.items():
            family = streamed.stream.family
            if self.before.get(name, streamed) is not streamed and family in kept:
                leasing.call(protocol.Resize(leasing.session.next_id(), family, kept[family]))

    def _family(
        self,
        piece: TensorGroup,
        how: Sharing,
        rest: Mapping[str, torch.Tensor],
        full: Sequence[tuple[ModelBlock, Mapping[str, torch.Tensor]]],
    ) -> None:
        parts = {protocol.REST: rest} if rest else {}
        parts |= {block.name: part for block, part in full}
        try:
            self._made[piece] = self.client.register_family(
                self.called(piece.name),
                {name: self.source(part) for name, part in parts.items()},
                policy=how.policy,
                group=self._group if how.is_exclusive else None,
                resident=how.resident,
            )
        except TooLarge as exc:
            block, part = max(full, key=lambda one: one[0].nbytes)
            raise TooLarge(
                f"{exc}. Each block must fit, and {block.name!r} does not: "
                f"{finer(block.modules, self._room(rest, part))}"
            ) from exc


def stream_of(
    client: AttachClient, one: ComponentModule, names: Sequence[str]
) -> StreamedComponent | None:
    """Return how to stream a component that was registered or loaded as a family before `attach`.

    `names`: its names in the daemon, but those that `attach` registered. Its blocks are the
    outermost modules whose tensors are all in one part. Returns None if it is not one family, if it
    is compiled as one, or if a part has tensors outside the blocks: no call would show when these
    are needed.
    """
    families = {client.session.own(name).part_of for name in names} - {""}
    if len(families) != 1:
        return None
    family = families.pop()
    parts = client.session.registry.family(family)
    rest = protocol.rest_of(family)
    numbered = [part for part in parts if part != rest]
    blocks = _modules_of_parts(client, search.bare(one.module), numbered, parts)
    if blocks is None or search.compiled_around(one.module, itertools.chain(*blocks)) is not None:
        return None
    stream = Stream(client, family, rest if rest in parts else None, numbered)
    return StreamedComponent(stream, tuple(map(tuple, blocks)))


def _modules_of_parts(
    client: AttachClient, component: Module, numbered: Sequence[str], parts: Sequence[str]
) -> list[list[Module]] | None:
    """Return the modules of each numbered part; None if a part has no module, or other tensors."""
    blocks: dict[str, list[Module]] = {part: [] for part in numbered}
    waiting = [component]
    while waiting:
        module = waiting.pop(0)
        within = _parts_in(client, module.modules(), parts)
        if len(within) == 1 and within <= blocks.keys() and search.is_called(module):
            blocks[within.pop()].append(module)
        elif not blocks.keys().isdisjoint(_parts_in(client, [module], parts)):
            return None
        else:
            waiting += module.children()
    return list(blocks.values()) if all(blocks.values()) else None


def _parts_in(client: AttachClient, modules: Iterable[Module], parts: Sequence[str]) -> set[str]:
    found = (ownership.part_at(client, tensor) for tensor in ownership.bytes_of(modules))
    return {part.name for part in found if part is not None and part.name in parts}


def warn_of_registered(
    client: AttachClient,
    hows: Mapping[str, Sharing],
    made_of: Mapping[str, ownership.Parts],
    ours: Container[str],
) -> None:
    """Warn of components that were registered before, and do not share the device as `hows` has it.

    `ours`: names in the daemon that the attachment itself registered.
    """
    for name, how in hows.items():
        names = [part for part in made_of[name] if isinstance(part, str) and part not in ours]
        others = [part for part in map(client.session.own, names) if not how.is_of(part)]
        if others and how != Sharing():
            log.warning(
                "%r was registered before attach, as %r, and stays so: policy, settings, stay, "
                "resident and blocks do not change that. client.unregister(%r) it first, or give "
                "its policy to the call that registers it",
                name,
                others[0].policy,
                others[0].part_of or others[0].name,
            )
