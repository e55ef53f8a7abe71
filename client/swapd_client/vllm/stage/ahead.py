"""Loads the next stage while this one computes, because its requests will go there.

`topology.py` knows the next stages, and those that are done with these requests. Loading ahead uses
only free memory, and memory that the latter have released.
"""

from contextlib import suppress

from swapd_client.errors import SwapdError
from swapd_client.vllm.order import Neighbours
from swapd_client.vllm.stage.connection import Connection


class Ahead:
    """State of one stage, or of one of its ranks."""

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
        """Ask for the next stage, if it is registered. Call it once this stage holds its own lease.

        A hint: it costs a message and has no answer. Blocks only as `Leasing.hint`.
        """
        if self._after and not self._connection.alone:
            with suppress(SwapdError):  # the next acquire reports it
                self._connection.client._leasing.hint(*self._after, over=self._before)
