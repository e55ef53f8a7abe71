"""Forecasts of a waiting acquire, for the waiting program."""

import asyncio
from contextlib import suppress

from swapd.shared.protocol import Forecast, ForecastRequest
from swapd_client.errors import SwapdError
from swapd_client.lease_request import Progress
from swapd_client.session.channel import STILL_MS, Channel
from swapd_client.session.loop_channel import AsyncChannel
from swapd_client.session.session import Session


class WaitForecasts:
    """Asks for a forecast at every second look, and reports it at the next."""

    def __init__(self, channel: Channel, number: int, acquire: int, progress: Progress) -> None:
        self._channel, self._progress = channel, progress
        self._request = ForecastRequest(number, (), acquire)
        self._is_asked = False

    def look(self) -> None:
        """Called in the waiting thread, from time to time and when a reply has come."""
        if not self._is_asked:
            self._is_asked = True
            self._channel.ask(self._request)
        elif (reply := self._channel.collect(self._request.id, within_s=0.0)) is not None:
            self._is_asked = False
            if isinstance(reply, Forecast):  # else the acquire was granted meanwhile
                self._progress(reply)

    def end(self) -> None:
        self._channel.drop(self._request.id)


async def tell(channel: AsyncChannel, session: Session, acquire: int, progress: Progress) -> None:
    """As `WaitForecasts`, in a task of its own, until it is cancelled."""
    while True:
        await asyncio.sleep(STILL_MS / 1000)
        reply = None
        with suppress(SwapdError):  # the acquire raises it, too
            reply = await channel.call(ForecastRequest(session.next_id(), (), acquire))
        if isinstance(reply, Forecast):
            progress(reply)
