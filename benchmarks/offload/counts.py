"""Counts of every side."""

import msgspec


class Counts(msgspec.Struct, frozen=True):
    """Bytes since the start: into the device, back to the host, most on the device at once.

    `waited_s`: seconds without computing, because weights were being copied.
    """

    bytes_in: int
    bytes_back: int
    peak_bytes: int
    waited_s: float
