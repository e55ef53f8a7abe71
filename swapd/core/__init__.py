"""The pure part: what is resident, who waits, what to evict. No I/O, no clock, no torch."""

from swapd.core.residency import Residency, Rules

__all__ = ["Residency", "Rules"]
