"""What a worker does with the daemon's GPU: map chunks, wait for work, make streams wait.

Nothing here touches CUDA before a component of this process is registered: a process may connect
first, and fork then. No torch but what the process has loaded itself.
"""

from swapd.shared.board import Board
from swapd.shared.protocol import Welcome
from swapd_client.leases.agents import Agents
from swapd_client.session.files import Files
from swapd_client.session.gpu.card import Card
from swapd_client.session.gpu.mapping import GpuRange
from swapd_client.session.gpu.releases import GpuWork, Releases
from swapd_client.session.gpu.streams import Doorbell, current_stream, empty_cache, handle_of

__all__ = ["Gpu", "GpuRange", "GpuWork", "empty_cache", "handle_of"]


class Gpu:
    """All of one session's use of the GPU."""

    def __init__(self, welcome: Welcome, files: Files, board: Board) -> None:
        """Does not touch the GPU."""
        self.card = Card(welcome, files)
        self.doorbell = Doorbell(self.card, board)
        self.releases = Releases(self.card)
        self.agents = Agents()

    def __repr__(self) -> str:
        return f"<Gpu {self.card!r} {self.releases!r}>"

    def current_stream(self) -> int:
        """The stream on which this thread works."""
        return current_stream(self.card.index)

    def close(self) -> None:
        """Let go of what can be: all words on the board must have been raised before."""
        self.doorbell.close()
        ended = self.releases.close()
        self.card.close(keep_context=not ended)
