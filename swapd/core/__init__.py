"""Decides which components are resident, which requests wait, and what to evict. Pure."""

from swapd.core.records import Rules
from swapd.core.residency import Residency

__all__ = ["Residency", "Rules"]
