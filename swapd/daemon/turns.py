"""The order in which the daemon carries out the actions of the core. Pure."""

from collections.abc import Iterable

from swapd.core.actions import AnyAction, CopyIn, Evict, Evicted, Revoke

#: An action, and its number in the swap log.
Numbered = tuple[AnyAction, int]


def copies_first(numbered: Iterable[Numbered]) -> list[Numbered]:
    """The same in their order, except that loads begin before workers are told of evictions that
    they need not acknowledge.

    The daemon does not wait for such a worker, which may read the message when most of the copy is
    done. If the daemon dies before the message, the worker goes on with its host copy anyway. But
    the message takes time, and wakes the worker to unmap: the thread that begins the copy needs
    that time and processor.
    """
    done: list[Numbered] = []
    untold: list[Numbered] = []
    for one in numbered:
        action = one[0]
        if isinstance(action, Revoke) and not action.ack:
            untold.append(one)
            continue
        if untold and not isinstance(action, CopyIn | Evict | Evicted):
            done += untold
            untold.clear()
        done.append(one)
    return done + untold
