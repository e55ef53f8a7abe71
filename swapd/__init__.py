"""swapd: one daemon per device that lets worker processes take turns on its memory.

This file imports nothing: the client imports `swapd.shared.protocol` and must stay light.
"""

__version__ = "0.1.0"
