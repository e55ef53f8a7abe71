"""What becomes of a session's components when it is closed."""

import warnings
from collections.abc import Callable
from functools import partial

from swapd.shared.units import size
from swapd_client.errors import DaemonGone, SwapdError
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.processor import Processor
from swapd_client.session.registry import Registry


def make_all_private(
    registry: Registry, processor: Processor, error: SwapdError | None
) -> list[str]:
    """Make every component private memory; return those that have no memory now, as people are
    told of them.

    `error`: why the session ended.
    """
    parts = registry.all()
    processor.before_private(parts)
    # on a GPU there may be no room for a copy of what is in use, and there need be none when the
    # daemon is dead: nobody else will use its memory
    died = isinstance(error, DaemonGone)
    spares = processor.memory_is_scarce and died
    staying = [part for part in parts if _stays(part, spares=spares)]
    leaving = [part for part in parts if not _stays(part, spares=spares)]
    bare = [part for part in staying if not registry.try_unbind(part, keep_shown=True)]
    processor.let_go_of(leaving)
    bare += [part for part in leaving if not registry.try_unbind(part, keep_shown=False)]
    return [f"{part.name!r} ({size(part.nbytes)})" for part in bare]


def _stays(part: Part, *, spares: bool) -> bool:
    """Whether its chunks may have later bytes than its master, or are as good.

    What was still coming in when the session ended is in the master alone.
    """
    return not part.incomplete and (part.mutable or (spares and part.holders > 0))


def let_go_of_all(registry: Registry, processor: Processor) -> None:
    """Have nothing of any component."""
    for part in registry.all():
        registry.let_go(part)
    processor.let_go_of(())


def when_left(staying: list[Place], let_go: Callable[[], None]) -> None:
    """Call `let_go` now, or when the last of what stays on the daemon's memory has left it."""

    def left(where: Place) -> None:
        staying.remove(where)
        if not staying:
            let_go()

    for where in staying:
        where.when_left = partial(left, where)
    if not staying:
        let_go()


def warn_of(without_memory: list[str]) -> None:
    """Components whose tensors are nowhere; of `Client.close`, three calls up."""
    names = ", ".join(without_memory)
    warnings.warn(
        f"the GPU has no room for private copies of {names}: their tensors must not be "
        "touched any more. Free GPU memory before close(), or keep the client open",
        RuntimeWarning,
        stacklevel=4,
    )
