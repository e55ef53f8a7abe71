"""In which order the daemon does what the core orders. Pure."""

from collections.abc import Iterable

from swapd.core.actions import AnyAction, CopyIn, Evict, Evicted, Revoke

#: An action, and its number in the swap log.
Numbered = tuple[AnyAction, int]


def copies_first(numbered: Iterable[Numbered]) -> list[Numbered]:
    """The same, in their order, but that copies in begin before workers are told of evictions that
    they need not acknowledge.

    Nobody waits for such a worker, which may read the message when most of the copy is done; and if
    the daemon dies before it is told, it goes on with its host copy all the same. But to tell it
    takes time, and it then wakes up to unmap: time, and a processor, that the thread has use for
    that begins the copy.
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
