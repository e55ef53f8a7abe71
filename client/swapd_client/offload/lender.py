"""The client's interface for attached models."""

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

from swapd.shared.protocol import Forecast
from swapd_client.errors import SessionEnded
from swapd_client.leasing import Leasing
from swapd_client.memory.component import Component
from swapd_client.session.session import Session


class AttachClient(Protocol):
    """The part of a `Client` that attached models need."""

    attachments: WeakSet[Any]

    @property
    def session(self) -> Session: ...

    @property
    def leasing(self) -> Leasing: ...

    def register(self, *args: Any, **kwargs: Any) -> Component: ...

    def register_family(self, *args: Any, **kwargs: Any) -> list[Component]: ...

    def forecast(self, *names: str) -> Forecast: ...

    def _daemon_gone(self, error: SessionEnded) -> bool: ...

    def _join_next(self, error: SessionEnded) -> None: ...

    def _update_together(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Give several components new values in one step."""
