"""The components that this process has registered with one daemon, and the moves of tensors to
their ranges; `unbinding.py` has the way back. `registration.py` sends the requests in between.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any, get_args

from swapd.shared import protocol, vm
from swapd.shared.board import Board
from swapd.shared.fds import OwnedFd
from swapd.shared.units import size
from swapd_client.checks import check_name
from swapd_client.errors import (
    DuplicateName,
    InUse,
    InvalidArgument,
    InvalidSource,
    UnknownComponent,
)
from swapd_client.interrupts import covered_block
from swapd_client.log import log
from swapd_client.memory import place, ranges
from swapd_client.memory.layout import ContentMismatch, InMemory, Layout, Segments
from swapd_client.memory.part import Claim, Part
from swapd_client.memory.place import FormerPlace, Place
from swapd_client.memory.sources import layout_of, module_of
from swapd_client.session.endpoint import need_descriptors
from swapd_client.session.life import Life, Masters, WaiterNotices
from swapd_client.session.processor import Processor
from swapd_client.session.unbinding import Unbinding

MASTER_DESCRIPTORS = 4


class Registry:
    """The registered components of one session. Thread-safe."""

    def __init__(
        self,
        life: Life,
        processor: Processor,
        board: Board,
        masters: Masters,
        told: WaiterNotices,
        chunk_bytes: int,
    ) -> None:
        self.parts: dict[str, Part] = {}
        self._life = life
        self._lock = life.lock
        self._processor = processor
        self._masters = masters
        self._chunk_bytes = chunk_bytes
        #: Bytes to keep on the device, by family.
        self.kept: dict[str, int | None] = {}
        #: Stands for the session in claims, without keeping it alive.
        self._owner = object()
        self.unbinding = Unbinding(life, processor, board, told, self.parts)

    def all(self) -> list[Part]:
        """Return a copy, because other threads may change the parts."""
        with self._lock:
            return list(self.parts.values())

    def own(self, name: str) -> Part:
        with self._lock:
            part = self.parts.get(name)
        if part is None:
            raise UnknownComponent(
                f"{name!r} is not registered by this process, and only its owner can do that; "
                f"registered here: {', '.join(sorted(self.parts)[:8]) or 'nothing'}"
            )
        return part

    def resized(self, name: str, nbytes: int | None) -> None:
        """Record a size granted by the daemon. The family may be another process's."""
        if self.family(name):
            self.kept[name] = nbytes

    def forget_size(self, family: str) -> None:
        """Forget the size of a family without parts: the daemon has forgotten it, too."""
        if not self.family(family):
            self.kept.pop(family, None)

    def family(self, name: str) -> list[str]:
        """Return the parts of a family, by name; none for "", of which all others are."""
        with self._lock:
            return [part.name for part in self.parts.values() if name and part.part_of == name]

    # --- in ------------------------------------------------------------------------------

    def prepare(
        self,
        name: str,
        source: object,
        *,
        mutable: bool,
        segments: Segments = (),
        part_of: str = "",
        policy: protocol.Policy = "lru",
        group: str | None = None,
        stays: bool = False,
    ) -> Part:
        """Reserve a range for `source`, or take over its range if it was a component before.

        Nothing is copied or rebound yet. The first call blocks for a moment on a GPU. Raises:
        DeviceFailed; InvalidSource if `stays` is set and the source cannot keep its address.
        """
        check_name(part_of, "part_of")
        self._check_new(name)
        claim: Claim | None = None
        try:
            with ranges.moving:
                processor = self._processor
                layout = layout_of(source, segments, processor.index, processor.fetch)
                claim = Claim(self._owner, part_of or name, tuple(layout.memory))
                ranges.claim(claim, layout.origins())
            before = self._take_back(layout)
            if not mutable and isinstance(layout, InMemory):
                layout.guess()
            where = self._place(name, layout, before, writable=mutable, stays=stays)
            return Part(
                name,
                layout,
                where,
                claim,
                mutable=mutable,
                part_of=part_of,
                policy=policy,
                group=group,
                module=module_of(source),
            )
        except BaseException:
            if claim is not None:
                ranges.release(claim)
            raise

    def prepare_again(self, part: Part) -> Part:
        """As `prepare`, but take over the range of a component of a session that has ended.

        Raises: InvalidSource if the component cannot keep its address.
        """
        self._check_new(part.name)
        spans = part.layout.spans(part.address)
        claim = Claim(self._owner, part.part_of or part.name, tuple(at for at, _ in spans))
        with ranges.moving:
            ranges.claim(claim, [(part.name, *span) for span in spans], part)
        try:
            fits = self._processor.fits(part.where) and not part.where.over
            private = place.find(self._processor.key, spans)
            there = private or FormerPlace(part.where, spans, part.old_master)
            before = there if fits else None
            where = self._place(part.name, part.layout, before, writable=part.mutable, stays=True)
            old_master = _old_master(there)
        except BaseException:
            ranges.release(claim)
            raise
        # in private memory it may have contents again, written since the daemon's end
        part.begin_again(where, claim, old_master, is_lost=part.is_lost and private is None)
        return part

    def _check_new(self, name: str) -> None:
        self._life.check()
        check_name(name)
        with self._lock:
            if name in self.parts:
                raise DuplicateName(f"{name!r} is registered by this process; unregister it first")

    def _place(
        self, name: str, layout: Layout, before: FormerPlace | None, *, writable: bool, stays: bool
    ) -> Place:
        if stays and before is None and layout.nbytes:
            raise InvalidSource(
                f"{name!r} cannot keep its address: it is not as it was with a daemon that is gone "
                f"now, or was in chunks of another size than {size(self._chunk_bytes)}"
            )
        place = before and before.where
        return self._processor.reserve(layout.nbytes, place, writable=writable)

    def _take_back(self, layout: Layout) -> FormerPlace | None:
        """Return the private memory of `layout`, if it can be a component there.

        `place` remembers it until `bind`: an interrupt may come before a part has it.
        """
        found = place.find(self._processor.key, layout.lies())
        if found and self._processor.fits(found.where) and layout.stay(found.where.address):
            return found
        return None

    def prepare_family(self, name: str, parts: Mapping[str, Any], **how: Any) -> Iterator[Part]:
        """Reserve a range for each of `parts`. After an error the caller discards those yielded."""
        if not (parts and hasattr(parts, "items")):
            raise InvalidArgument(f"{name!r} has no parts; give a dict of at least one, by name")
        prepared: list[Part] = []
        for part, source in parts.items():
            called = protocol.part_name(name, part)
            one = self.prepare(called, source, part_of=name, **how)
            yield one  # at once, or an interrupt would lose it
            prepared.append(one)
        _check_apart(prepared)

    def request(self, part: Part, number: int, *, transient: bool) -> protocol.Register:
        """Return the request for a host copy. Raises: InvalidArgument, LimitReached."""
        if (policy := part.policy) not in (policies := get_args(protocol.Policy)):
            raise InvalidArgument(
                f"there is no policy {policy!r}; there are: {', '.join(policies)}"
            )
        need_descriptors(MASTER_DESCRIPTORS, f"to register {part.name}")
        part.request = number
        return protocol.Register(
            number,
            part.name,
            part.nbytes,
            part.layout.digest(),
            policy,
            part.group,
            part.mutable,
            part.layout.segments if part.segments > 1 else (),
            part.part_of,
            part.layout.content,
            transient,
            part.scratch,
            part.layout.filled,
            part.layout.certain and part.layout.content != "",
        )

    def fill(self, part: Part) -> None:
        """Copy the source into the host copy that the daemon has sent. Blocks for the copy.

        If another process has filled it, compare instead: the daemon knows only that both named the
        same source. Where it keeps host copies, it vouches for those of files. Raises:
        ContentMismatch if bytes differ.
        """
        message, part.master = self._masters.take(part.request)
        part.slot = message.slot
        if message.filled and part.old_master is not None:
            if not part.has_old_bytes():
                raise ContentMismatch(part.name, was_guessed=True)
        elif part.old_master is not None:
            part.fill_from_old()
        elif part.is_again:
            if part.nbytes and part.has_contents:
                self._processor.save(part.address, part.nbytes, part.master.fileno())
        elif part.nbytes and message.filled:
            trusted = message.certain and part.layout.certain
            if not trusted and not part.layout.matches(part.master.fileno()):
                raise ContentMismatch(part.name, was_guessed=isinstance(part.layout, InMemory))
        elif part.nbytes:
            part.layout.fill_file(part.master.fileno())

    def enter(self, part: Part) -> None:
        with self._lock:
            self.parts[part.name] = part

    def bind(self, part: Part) -> None:
        """Make the source use the range. May be repeated after an interrupt."""
        with ranges.moving:
            part.bind()
            ranges.add(part, self._owner)
            place.forget(part.where)
            ranges.release(part.claim)
        part.close_old()
        self._processor.attempt(part.where.give_up_private)

    def start_over(self, parts: Iterable[Part], lie: ContentMismatch) -> None:
        """Prepare to register these without sharing, because the shared bytes differ."""
        if not lie.was_guessed:
            log.warning(
                "the bytes that another process shares as %r differ from the files: they are "
                "read from the files instead. swapd status shows that process",
                lie.name,
            )
        for part in parts:
            self.forget(part)
            part.close()
            part.request, part.layout.content = 0, ""

    def forget(self, part: Part) -> None:
        """Undo `enter`, or `request` if the host copy has not come."""
        with self._lock:
            if self.parts.get(part.name) is part:
                del self.parts[part.name]
        if part.request and part.master is None:
            self._masters.forget(part.request)

    def discard(self, part: Part) -> None:
        """Undo a failed registration. The source is unchanged."""
        ranges.release(part.claim)
        self.forget(part)
        if not part.where.taken_over:
            part.where.discard()
        elif part.where.stay_private():
            self.unbinding.keep(part)
        else:  # another thread has been granted it already
            self.unbinding.try_unbind(part, keep_shown=part.mutable)
        part.close()

    # --- in use --------------------------------------------------------------------------

    def take_away(self, name: str, generation: int) -> bool:
        """Unmap the chunks of this generation; return False if they are still mapped."""
        part = self.parts.get(name)
        if part is None:
            return True
        self._processor.before_revoking(part, generation)
        return self._processor.attempt(part.where.revoke, generation)

    def saved(self, message: protocol.Saved) -> None:
        if part := self.parts.get(message.name):
            part.where.saved(message.generation)
            if message.anew:
                part.lost = message.generation

    def map_master(self, part: Part) -> int | None:
        """Map a host copy privately; the caller frees `part.span` bytes. None if the bytes are
        elsewhere.

        A mutable component's host copy has the bytes of its last write-back.
        """
        with self._lock:  # a host copy stays open until its component is removed
            known = self.parts.get(part.name) is part
            has_them = part.master or (part.old_master and not part.where.shown)
            return part.map_master() if known and has_them else None


@covered_block
def alone(life: Life, parts: Collection[Part]) -> Generator[None, None, None]:
    """In the block, no other thread updates or unregisters these. Raises: InUse.

    The daemon refuses that, too, but knows nothing of a thread that has its answer.
    """
    block = object()
    try:
        with life.lock:
            for part in parts:
                if part.changed_in is not None:
                    raise InUse(
                        f"{part.name!r} is being updated or unregistered by another thread of "
                        "this process: wait for that one"
                    )
            for part in parts:
                part.changed_in = block
        yield
    finally:
        for part in parts:
            if part.changed_in is block:
                part.changed_in = None


def _old_master(before: FormerPlace) -> OwnedFd | None:
    """Return an earlier daemon's host copy, if it still has the component's bytes.

    Writes to private memory on a GPU cannot be detected.
    """
    if before.master is None:
        return None
    where = before.where
    if where.addressable:
        has_them = vm.is_unwritten(where.address, vm.round_up(where.nbytes))
    else:
        has_them = not where.shown
    return before.master if has_them else None


def _check_apart(parts: Iterable[Part]) -> None:
    """Raise if two parts share memory, because each would move it to its own range."""
    seen: dict[int, str] = {}
    for part in parts:
        for address in part.layout.memory:
            other = seen.setdefault(address, part.name)
            if other != part.name:
                raise InvalidSource(
                    f"{other!r} and {part.name!r} share tensors (tied weights, or views of one "
                    "storage); name those in one part only, the one that is needed first"
                )
