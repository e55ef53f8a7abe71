"""A worker's use of the daemon's GPU: map chunks, wait for work, make streams wait."""

from swapd_client.session.gpu.gpu import Gpu
from swapd_client.session.gpu.mapping import GpuRange

__all__ = ["Gpu", "GpuRange"]
