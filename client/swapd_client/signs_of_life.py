"""Tells a daemon that takes long to do what it is told from one that does nothing any more."""

from swapd_client.session.channel import STILL_MS, Channel
from swapd_client.session.session import Session


class SignsOfLife:
    """Asks a daemon again and again, while it does something, to answer a harmless request."""

    def __init__(self, session: Session, channel: Channel, silent_s: float) -> None:
        self._session, self._channel, self._silent_s = session, channel, silent_s
        self._asked = 0
        self._looks = 0

    def look(self) -> None:
        """Called in the waiting thread every STILL_MS. Raises Timeout after `silent_s` of silence.

        Counts its calls, because this process may have been stopped itself.
        """
        if self._asked and self._channel.collect(self._asked, within_s=0.0) is None:
            self._looks += 1
            if self._looks * STILL_MS >= self._silent_s * 1000:
                raise self._session.lifeline.not_answering(self._silent_s)
            return
        request = self._session.harmless()
        self._asked, self._looks = request.id, 0
        self._channel.ask(request)

    def end(self) -> None:
        self._channel.drop(self._asked)
