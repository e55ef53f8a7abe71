"""Models that become garbage while they are attached: their components are unregistered.

Not so on a GPU: there private memory stays for as long as the process lives, in which work that was
put on a stream may still read it. A component that stays registered costs less: it is evicted when
others need the memory. So that is said, and it stays.

An attachment is kept by the hooks that it put on its model, and by nothing of the client's. So it
goes with the model, and not before. It is the garbage collector that says so, in any thread, under
any lock, perhaps in a forked child: whoever hears it takes none, and leaves the rest to a thread.
"""

import _thread
import logging
import os
import threading
import weakref
from collections import deque
from contextlib import suppress

from swapd_client.errors import SwapdError, UnknownComponent
from swapd_client.lease import Lender
from swapd_client.offload import growth
from swapd_client.offload.attachment import Attachment

log = logging.getLogger("swapd_client")

#: Clients, and what they registered for models that are no more.
_left: deque[tuple[Lender, list[str]]] = deque()
_one_at_a_time = threading.Lock()


def take_back_if_dropped(client: Lender, attachment: Attachment) -> None:
    """See to it that what is registered for `attachment` goes with it, if it is not detached."""
    gone = weakref.finalize(attachment, _dropped, client, attachment.registered)
    gone.atexit = False


def _dropped(client: Lender, names: list[str]) -> None:
    if not names or client.session.forked:
        return
    _left.append((client, names))
    with suppress(RuntimeError):  # the process ends
        _thread.start_new_thread(settle, ())


def settle() -> None:
    """Unregister what is left of models that are no more. Blocks until it is done."""
    with _one_at_a_time:
        while True:
            try:
                client, names = _left.popleft()
            except IndexError:
                break
            while names:
                _take_back(client, names.pop())
            del client  # it may be garbage too
    growth.rest()


def _take_back(client: Lender, name: str) -> None:
    if client.session.processor.memory_is_scarce and client.session.error is None:
        log.warning(
            "%r stays registered, though its model is no more: it leaves the GPU when others need "
            "the memory, and the host when the client is closed. Before a model goes, detach() it",
            name,
        )
        return
    try:
        client.unregister(name)
    except UnknownComponent:  # somebody did
        pass
    except SwapdError as exc:
        if client.session.error is None:  # else nothing is registered any more
            log.warning(
                "%r stays registered, though its model is no more: %s. client.unregister(%r) "
                "takes it back",
                name,
                exc,
                name,
            )


def _forget_in_child() -> None:
    global _one_at_a_time  # whoever holds it is the parent's
    _one_at_a_time = threading.Lock()
    _left.clear()


os.register_at_fork(after_in_child=_forget_in_child)
