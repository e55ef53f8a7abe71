"""How requests keep leases in use while others wait. Pure.

No clock, thread or socket; times are seconds on the caller's clock. Not thread-safe.
"""


class RequestKeeping:
    """Whether a request keeps the components that one of its calls loaded, for its next call."""

    def __init__(self, within_s: float) -> None:
        """`within_s`: how long components that others want are still kept."""
        self._within_s = within_s
        #: Time at which wanted components are given back; None: none are wanted.
        self._until: float | None = None

    def keeps(self, now: float, *, wanted: bool) -> bool:
        """Whether a call's components are kept at its end. `wanted`: an acquire waits for them."""
        if not wanted:
            return True
        if self._until is None:
            self._until = now + self._within_s
        if now < self._until:
            return True
        self._until = None
        return False

    def over(self) -> None:
        """All components were given back."""
        self._until = None
