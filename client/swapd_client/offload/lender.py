"""The client's interface for attached models."""

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

from swapd.shared.protocol import ForecastReply, Policy
from swapd_client.lease import Lease
from swapd_client.leasing import Leasing
from swapd_client.memory.component import Component
from swapd_client.memory.layout import Segments
from swapd_client.memory.sources import Source
from swapd_client.session.session import Session


class Lender(Protocol):
    """The part of a client that attached models need; names with _ are for `offload` alone.

    Blocking and errors are those of `Client`.
    """

    session: Session
    #: How the client's threads ask for leases and give them back.
    _leasing: Leasing
    #: The attachments of models that are still attached.
    _attachments: WeakSet[Any]

    def register(
        self,
        name: str,
        source: Source,
        *,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
        part_of: str = "",
    ) -> Component:
        """Register a component."""

    def register_family(
        self,
        name: str,
        parts: Mapping[str, Source],
        *,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
    ) -> list[Component]:
        """Register a component in parts."""

    def unregister(self, name: str) -> None:
        """End the registration of a component or a family."""

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
    ) -> Lease:
        """Hold all of `names`."""

    def forecast(self, *names: str, timeout: float | None = None) -> ForecastReply:
        """Forecast an `acquire`."""

    def _update_together(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Give several components new values in one step."""
