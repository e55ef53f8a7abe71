"""`swapd pin`, `swapd unpin`, `swapd evict`: keep a component on the device, or evict it."""

import time
from typing import Annotated

import typer

from swapd.cli.common import TIMEOUT_S, Endpoint, Timeout, ask, console
from swapd.cli.target import Device
from swapd.shared.protocol import ComponentStatus, StatusReply
from swapd.shared.text import plain
from swapd.shared.units import size
from swapd_client import Client, ComponentInUse

#: States without memory of the device.
_OUT = ("absent", "filling")

#: Seconds for which a client may keep an unused lease, and the pause between two attempts.
_KEPT_S, _AGAIN_S = 0.5, 0.05

Name = Annotated[str, typer.Argument(help="A component, also one with parts")]


def pin(
    name: Name,
    endpoint: Endpoint = None,
    device: Device = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Keep a component on the device: load it when there is room, and do not evict it.

    Lasts until `swapd unpin`, or until the component is unregistered. Of a component in parts,
    only its resident parts stay.
    """
    with ask(endpoint, "pin", timeout, device) as client:
        client.pin(name, timeout=timeout)
        client.prefetch(name, timeout=None)
        pinned = [c for c in _members(client.status(timeout=timeout), name) if c.pinned]
    stays = [c for c in pinned if c.policy == "permanent"]
    coming = [c for c in stays if c.state in _OUT]
    said = f"{plain(name)}: {_amount(stays)} {'stays' if pinned else 'is not there any more'}"
    if coming:
        said += f"; {_amount(coming)} of it once there is room"
    console.print(said, markup=False)


def unpin(
    name: Name,
    endpoint: Endpoint = None,
    device: Device = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Allow the eviction of a pinned component again."""
    with ask(endpoint, "unpin", timeout, device) as client:
        client.unpin(name, timeout=timeout)
    console.print(f"{plain(name)}: may be evicted", markup=False)


def evict(
    name: Name,
    endpoint: Endpoint = None,
    device: Device = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Evict an idle component at once, and save changes to it."""
    with ask(endpoint, "evict", timeout, device) as client:
        _evict(client, name, timeout)
        there = [c for c in _members(client.status(timeout=timeout), name) if c.state not in _OUT]
    leaving = [c for c in there if c.state in ("revoking", "writing back")]
    said = f"{plain(name)}: is out"
    if leaving:
        said = f"{plain(name)}: {_amount(leaving)} is leaving, and saved first"
    elif there:
        said = f"{plain(name)}: is out, but for {_amount(there)}"
    console.print(said, markup=False)


def _evict(client: Client, name: str, timeout: float) -> None:
    """Evict it, in several attempts: a client keeps an unused lease for a moment."""
    give_up = time.monotonic() + _KEPT_S
    while True:
        try:
            return client.evict(name, timeout=timeout)
        except ComponentInUse:
            if time.monotonic() > give_up:
                raise
        time.sleep(_AGAIN_S)


def _members(reply: StatusReply, name: str) -> list[ComponentStatus]:
    return [c for c in reply.components if name in (c.name, c.part_of)]


def _amount(components: list[ComponentStatus]) -> str:
    return size(sum(c.nbytes for c in components))
