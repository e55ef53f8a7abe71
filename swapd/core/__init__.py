"""The pure part decides which components are resident, which requests wait, and what to evict. No
I/O, no clock, no torch."""

from swapd.core.records import Rules
from swapd.core.residency import Residency

__all__ = ["Residency", "Rules"]
