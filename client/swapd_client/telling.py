"""Forecasts of an acquire that waits, for the program that waits."""

from swapd.shared.protocol import Forecast, ForecastRequest
from swapd_client.asked import Progress
from swapd_client.session.channel import Channel


class Telling:
    """Asks for a forecast of an acquire at each second look, and tells it at the next."""

    def __init__(self, channel: Channel, number: int, acquire: int, progress: Progress) -> None:
        """`number`: of its requests, one at a time."""
        self._channel, self._progress = channel, progress
        self._request = ForecastRequest(number, (), acquire)
        self._is_asked = False

    def look(self) -> None:
        """Called from time to time, and when a reply has come, in the thread that waits."""
        number = self._request.id
        if not self._is_asked:
            self._is_asked = True
            self._channel.ask(self._request)
        elif (reply := self._channel.answer(number)) is not None:
            self._is_asked = False
            self._channel.drop(number)
            if isinstance(reply, Forecast):  # else it was granted meanwhile
                self._progress(reply)

    def end(self) -> None:
        self._channel.drop(self._request.id)
