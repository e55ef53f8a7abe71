"""Opens the session of a client, for both clients; its daemon may be started for it."""

import os
from functools import partial

from swapd.shared.config import DEVICE_NAME
from swapd_client.errors import InvalidSettings
from swapd_client.session.endpoint import label_of, resolve
from swapd_client.session.session import Session
from swapd_client.session.starting import connected


def open_session(
    endpoint: str | os.PathLike[str] | None,
    device: str | None,
    label: str | None,
    timeout: float,
    *,
    start: bool,
    budget: int | str | None,
) -> Session:
    """Open the session of `connect`. Blocks and raises as `connect` does."""
    if isinstance(endpoint, str) and DEVICE_NAME.fullmatch(endpoint):
        if device not in (None, endpoint):
            raise InvalidSettings(f"connect({endpoint!r}, device={device!r}) names two devices")
        endpoint, device = None, endpoint
    folder = resolve(endpoint, device)
    opened = partial(Session, folder, label_of(label), timeout)
    if start:
        return connected(folder.absolute(), device, budget, opened)
    if budget is not None:
        raise InvalidSettings("budget= is for a daemon that connect starts: add start=True")
    return opened()
