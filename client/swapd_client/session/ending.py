"""The components of a session when it is closed."""

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
    """Make every component private memory; add those without memory to `bare`, for `warn_of`.

    `error`: the reason for the end of the session. After an interrupt all of it may be done again.
    """

    def unbind(part: Part, *, keep_shown: bool) -> None:
        if not registry.try_unbind(part, keep_shown=keep_shown) and part not in bare:
            bare.append(part)

    parts = registry.all()
    processor.before_private(parts)
    # a GPU may have no room for copies of components in use; if the daemon is dead they need none,
    # because no other process will use its memory
    spares = processor.memory_is_scarce and isinstance(error, DaemonGone)
    staying = [part for part in parts if _stays(part, spares=spares)]
    leaving = [part for part in parts if not _stays(part, spares=spares)]
    for part in staying:
        to_its_end(partial(unbind, part, keep_shown=True))
    processor.let_go_of(leaving)
    for part in leaving:
        to_its_end(partial(unbind, part, keep_shown=False))


def _stays(part: Part, *, spares: bool) -> bool:
    """Whether its chunks may have later bytes than its host copy, or the same.

    A component that was still loading when the session ended is complete in the host copy only.
    """
    return not part.incomplete and (part.mutable or (spares and bool(part.holders)))


def leave_all(registry: Registry, processor: Processor) -> None:
    """Have every component wait for the next daemon. After an error all of it may be done again."""
    parts = registry.all()
    processor.before_private(parts)
    for part in parts:
        registry.leave(part)
    processor.let_go_of(())


def let_go_of_all(registry: Registry, processor: Processor) -> None:
    """Unmap all components, without private copies."""
    for part in registry.all():
        registry.let_go(part)
    processor.let_go_of(())


def when_left(staying: list[Place], let_go: Callable[[], None]) -> None:
    """Call `let_go` once the last place in `staying` has left the daemon's memory, or now."""

    def left(where: Place) -> None:
        staying.remove(where)
        if not staying:
            let_go()

    for where in staying:
        where.when_left = partial(left, where)
    if not staying:
        let_go()


def warn_of(without_memory: list[Part]) -> None:
    """Warn of components whose tensors are lost; the caller of `Client.close` is three calls up."""
    names = ", ".join(f"{part.name!r} ({size(part.nbytes)})" for part in without_memory)
    warnings.warn(
        f"the GPU has no room for private copies of {names}: do not use their tensors "
        "any more. Free GPU memory before close(), or keep the client open",
        RuntimeWarning,
        stacklevel=4,
    )
