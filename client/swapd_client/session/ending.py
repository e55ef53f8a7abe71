"""What happens to a session's components when the session is closed."""

import warnings
from collections.abc import Callable
from functools import partial

from swapd.shared.units import size
from swapd_client.errors import DaemonGone, SwapdError
from swapd_client.leases.covered import to_its_end
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.processor import Processor
from swapd_client.session.registry import Registry


def make_all_private(
    registry: Registry, processor: Processor, error: SwapdError | None, bare: list[Part]
) -> None:
    """Make every component private memory; list those without memory in `bare`, for `warn_of`.

    `error` is the reason for the session's end. May be repeated after an interrupt.
    """

    def unbind(part: Part, *, keep_shown: bool) -> None:
        if not registry.try_unbind(part, keep_shown=keep_shown) and part not in bare:
            bare.append(part)

    parts = registry.all()
    processor.before_private(parts)
    # A GPU may lack room to copy components in use. If the daemon is dead, no other process will
    # use their chunks, so they need no copy.
    spares = processor.memory_is_scarce and isinstance(error, DaemonGone)
    staying = [part for part in parts if _stays(part, spares=spares)]
    leaving = [part for part in parts if not _stays(part, spares=spares)]
    for part in staying:
        to_its_end(partial(unbind, part, keep_shown=True))
    processor.let_go_of(leaving)
    for part in leaving:
        to_its_end(partial(unbind, part, keep_shown=False))


def _stays(part: Part, *, spares: bool) -> bool:
    """Return whether the component keeps its chunks, which must be complete."""
    return not part.incomplete and (part.mutable or (spares and bool(part.holders)))


def leave_all(registry: Registry, processor: Processor) -> None:
    """Leave all components to the next daemon's session. May be repeated after an error."""
    parts = registry.all()
    processor.before_private(parts)
    for part in parts:
        registry.leave(part)
    processor.let_go_of(())


def let_go_of_all(registry: Registry, processor: Processor) -> None:
    for part in registry.all():
        registry.let_go(part)
    processor.let_go_of(())


def when_left(staying: list[Place], let_go: Callable[[], None]) -> None:
    """Call `let_go` when the last of these places has left the daemon's memory."""

    def left(where: Place) -> None:
        staying.remove(where)
        if not staying:
            let_go()

    for where in staying:
        where.when_left = partial(left, where)
    if not staying:
        let_go()


def warn_of(without_memory: list[Part]) -> None:
    """Warn that these tensors are lost. `Client.close` is three calls up."""
    names = ", ".join(f"{part.name!r} ({size(part.nbytes)})" for part in without_memory)
    warnings.warn(
        f"the GPU has no room for private copies of {names}: do not use their tensors "
        "any more. Free GPU memory before close(), or keep the client open",
        RuntimeWarning,
        stacklevel=4,
    )
