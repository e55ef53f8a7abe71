"""Unregisters the components of models that become garbage while they are attached.

Not on a GPU: private memory there stays for the life of the process, since work queued on a stream
may still read it. A component that stays registered costs less, because the daemon can evict it. So
it stays, and the log says so.

Only the hooks on its model keep an attachment alive, nothing of the client's does. So it is
collected with the model. The garbage collector may run in any thread, under any lock, or in a
forked child: the finalizer takes no lock, and leaves the work to a thread.
"""

import _thread
import logging
import os
import threading
import weakref
from collections import deque
from contextlib import suppress

from swapd_client.errors import SwapdError, UnknownComponent
from swapd_client.offload import growth, tools
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.update_barrier import quiet

log = logging.getLogger("swapd_client")

#: Clients, and the components of models that were collected.
_left: deque[tuple[AttachClient, list[str]]] = deque()
_one_at_a_time = threading.Lock()


def take_back_if_dropped(client: AttachClient, attachment: Attachment) -> None:
    """Unregister an attachment's components when it is collected without `detach`."""
    gone = weakref.finalize(attachment, _dropped, client, attachment.registered)
    gone.atexit = False


def _dropped(client: AttachClient, names: list[str]) -> None:
    if not names or client.session.forked:
        return
    _left.append((client, names))
    with suppress(RuntimeError):  # the process is ending
        _thread.start_new_thread(settle, ())


def settle() -> None:
    """Unregister the components of collected models. Blocks until that is done."""
    with _one_at_a_time:
        while True:
            try:
                client, names = _left.popleft()
            except IndexError:
                break
            while names:
                _take_back(client, names.pop())
            del client  # the client may be garbage too
    growth.rest()
    tools.rest()


def _take_back(client: AttachClient, name: str) -> None:
    if client.session.processor.memory_is_scarce and client.session.error is None:
        log.warning(
            "%r stays registered, though its model is no more: swapd evicts it when others need "
            "the memory, and frees the host copy when the client closes. detach() a model before "
            "you drop it",
            name,
        )
        return
    try:
        with quiet({client: [name]}):  # other models may share weights with it
            client.unregister(name)
    except UnknownComponent:  # already unregistered
        pass
    except SwapdError as exc:
        if client.session.error is None:  # else no component is registered any more
            log.warning(
                "%r stays registered, though its model is no more: %s. client.unregister(%r) "
                "makes it private",
                name,
                exc,
                name,
            )


def _forget_in_child() -> None:
    global _one_at_a_time  # the parent's thread may hold the lock
    _one_at_a_time = threading.Lock()
    _left.clear()


os.register_at_fork(after_in_child=_forget_in_child)
