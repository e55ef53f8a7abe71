"""The next stage is brought in while this one computes: its requests will come there.

Which that is, and which stages have done with these requests, is said by `topology.py`. Only free
memory, and what those have released, is taken for it: what others hold or wait for is not.
"""

from contextlib import suppress

from swapd_client.errors import SwapdError
from swapd_client.vllm.order import Neighbours
from swapd_client.vllm.stage.connection import Connection


class Ahead:
    """Of a stage, or of one of its ranks."""

    def __init__(self, connection: Connection, neighbours: Neighbours) -> None:
        self._connection = connection
        _, ranked, rank = connection.stage.partition(".tp")
        ranks = ("", f"{ranked}{rank}") if ranked else ("",)
        self._after, self._before = (
            tuple(f"{name}{of}{what}" for name in names for of in ranks for what in ("", ".kv"))
            for names in neighbours
        )

    def __repr__(self) -> str:
        return f"<Ahead of {self._connection.stage}: {', '.join(self._after) or 'nothing'}>"

    def ask(self) -> None:
        """Have it brought in, if it is there. While this stage holds what it needs: not before.

        A hint: it costs a message, and nobody is told what becomes of it. Does not block but as
        `Client._hint`.
        """
        if self._after and not self._connection.alone:
            with suppress(SwapdError):  # the next acquire says so
                self._connection.client._hint(*self._after, over=self._before)
