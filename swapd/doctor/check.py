"""The result of one check."""

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True):
    """One finding. `fail`: swapd does not run without it; `warn`: something is slower or off.

    `advice` is the remedy, or empty if there is none.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
