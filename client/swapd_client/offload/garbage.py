"""Unregisters the components of models that become garbage while they are attached.

Not on a GPU: private memory there stays for the life of the process, since work queued on a stream
may still read it. A component that stays registered costs less, because the daemon can evict it. So
it stays, and the log says so.

Only the hooks on its model keep an attachment alive, nothing of the client's does. So it is
collected with the model.
"""

import logging
from functools import partial

from swapd_client.dropped import when_collected
from swapd_client.errors import SwapdError, UnknownComponent
from swapd_client.offload import growth, tools
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.update_barrier import quiet

log = logging.getLogger("swapd_client")


def take_back_if_dropped(client: AttachClient, attachment: Attachment) -> None:
    """Unregister an attachment's components when it is collected without `detach`."""
    work = partial(_take_back_all, client, attachment.registered)
    when_collected(attachment, client.session, work)


def _take_back_all(client: AttachClient, names: list[str]) -> None:
    if names:  # else it was detached
        while names:
            _take_back(client, names.pop())
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
