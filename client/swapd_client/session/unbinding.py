"""How components leave a session: as private memory, to the next daemon, or without their bytes."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial

from swapd.shared.board import Board
from swapd.shared.units import size
from swapd_client.errors import DaemonGone, OutOfMemory, SwapdError
from swapd_client.interrupts import to_its_end
from swapd_client.memory import place, ranges
from swapd_client.memory.part import Part
from swapd_client.memory.place import FormerPlace, Place
from swapd_client.session.life import Life, WaiterNotices
from swapd_client.session.processor import Processor


class Unbinding:
    """Takes components, with their tensors, out of the daemon's memory. Thread-safe."""

    def __init__(
        self,
        life: Life,
        processor: Processor,
        board: Board,
        told: WaiterNotices,
        parts: dict[str, Part],
    ) -> None:
        self._life = life
        self._processor = processor
        self._board = board
        self._told = told
        self._parts = parts
        #: Places where the daemon's memory stays mapped for writing after the close.
        self._staying: list[Place] = []
        self._could_write = False
        #: Components whose bytes are lost, because the GPU had no room for them at the close.
        self._bare: list[Part] = []

    def before_unbind(self, part: Part) -> None:
        """Make sure that `unbind` will have its memory. Raises: OutOfMemory."""
        try:
            part.where.set_memory_aside()
        except OutOfMemory as exc:
            raise OutOfMemory(f"{part.name!r} stays registered: {exc}") from exc

    def unbind(self, part: Part, *, keep_shown: bool = False) -> None:
        """Make a component's tensors private memory, with the same values and addresses.

        On a GPU it blocks for the copy, and raises OutOfMemory or DeviceFailed: the range is
        unmapped then. May be repeated after an interrupt.
        """
        try:
            is_saved = self._board.is_saved(part.slot, part.where.generation)
            bytes_of = (part.old_master or part.master) if part.has_contents else None
            part.where.make_private(bytes_of, keep_shown=keep_shown and not is_saved)
            self.keep(part)
            ranges.remove(part)
        except Exception:
            ranges.remove(part, is_gone=True)
            self._remove(part)
            raise
        self._remove(part)

    def try_unbind(self, part: Part, *, keep_shown: bool) -> bool:
        """As `unbind`; return False if there is no memory, or the GPU is lost."""

        def unbind() -> None:
            self.unbind(part, keep_shown=keep_shown)

        try:
            return self._processor.attempt(unbind)
        except OutOfMemory:
            return False

    def keep(self, part: Part) -> None:
        """Remember private memory, so that its tensors can be registered with the next daemon.

        Not after `unregister` or `close`: the caller may share it with tensors that swapd does not
        know.
        """
        if part.where.shown and (part.where.taken_over or self._life.deserted):
            found = FormerPlace(part.where, part.layout.spans(part.address), part.sealed_master())
            place.keep(self._processor.key, found)

    def _leave(self, part: Part) -> None:
        """Unmap the memory of a dead daemon: the component waits here for the next one.

        Bytes later than the host copy's become private memory; on the host, others do, too. May be
        repeated. Raises: DeviceFailed.
        """
        if part.master is None:
            return
        is_saved = part.incomplete or self._board.is_saved(part.slot, part.where.generation)
        self._processor.leave(part, keep_shown=part.mutable and not is_saved)
        self._note_staying(part)
        if part.has_contents:
            part.old_master = part.master
        else:
            part.master.close()
        part.master = None

    def _let_go(self, part: Part) -> None:
        self._processor.attempt(part.where.let_go)
        place.forget(part.where)  # by a try to join the next daemon
        ranges.remove(part, is_gone=True)
        self._remove(part)

    def _remove(self, part: Part) -> None:
        """Remove the component. May be repeated after an interrupt."""
        self._note_staying(part)
        with self._life.lock:
            self._told.wanted.discard(part.name)
            part.close()
            part.close_old()
            self._parts.pop(part.name, None)

    def _note_staying(self, part: Part) -> None:
        if part.mutable and part.where.on_chunks and part.where not in self._staying:
            self._staying.append(part.where)

    # --- when the session is closed ------------------------------------------------------

    def note_mutable(self, parts: Iterable[Part]) -> None:
        """Note, before they leave, whether this process could write to the daemon's memory."""
        self._could_write |= any(part.mutable for part in parts)

    def make_all_private(self, parts: list[Part], error: SwapdError | None) -> None:
        """Make every component private memory; `warn` names those without memory.

        `error` is the reason for the session's end. May be repeated after an interrupt.
        """

        def unbind(part: Part, *, keep_shown: bool) -> None:
            if not self.try_unbind(part, keep_shown=keep_shown) and part not in self._bare:
                self._bare.append(part)

        self._processor.before_private(parts)
        # A GPU may lack room to copy components in use. If the daemon is dead, no other process
        # will use their chunks, so they need no copy.
        spares = self._processor.memory_is_scarce and isinstance(error, DaemonGone)
        staying = [part for part in parts if _stays(part, spares=spares)]
        leaving = [part for part in parts if not _stays(part, spares=spares)]
        for part in staying:
            to_its_end(partial(unbind, part, keep_shown=True))
        self._processor.let_go_of(leaving)
        for part in leaving:
            to_its_end(partial(unbind, part, keep_shown=False))

    def leave_all(self, parts: list[Part]) -> None:
        """Leave all components to the next daemon's session. May be repeated after an error."""
        self._processor.before_private(parts)
        for part in parts:
            self._leave(part)
        self._processor.let_go_of(())

    def let_go_of_all(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._let_go(part)
        self._processor.let_go_of(())

    def when_left(self, let_go: Callable[[], None]) -> None:
        """Call `let_go` when this process can no longer write to any memory of the daemon.

        No-op if it never could.
        """
        if not self._could_write:
            return
        staying = self._staying  # the places, which may stay for good, keep only this alive

        def left(where: Place) -> None:
            staying.remove(where)
            if not staying:
                let_go()

        for where in staying:
            where.when_left = partial(left, where)
        if not staying:
            let_go()

    def warn(self) -> None:
        """Warn of tensors that are lost. `Client.close` is three calls up."""
        if not self._bare:
            return
        names = ", ".join(f"{part.name!r} ({size(part.nbytes)})" for part in self._bare)
        warnings.warn(
            f"the GPU has no room for private copies of {names}: do not use their tensors "
            "any more. Free GPU memory before close(), or keep the client open",
            RuntimeWarning,
            stacklevel=4,
        )


def _stays(part: Part, *, spares: bool) -> bool:
    """Return whether the component keeps its chunks, which must be complete. Others may be on the
    chunks of a component with a content, too."""
    spared = spares and bool(part.holders) and not part.layout.content
    return not part.incomplete and (part.mutable or spared)
