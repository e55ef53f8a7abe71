"""What one check found."""

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True):
    """One finding. `fail`: swapd does not run without it; `warn`: something is worse or off.

    `advice` says what to do; it is empty where there is nothing to be done.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
