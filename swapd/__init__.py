"""swapd: one daemon per device that lets worker processes take turns on its memory.

It has all names of `swapd_client`, such as `swapd.connect`, and imports it on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from swapd_client import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Return a public name of the client. The daemon never needs one, so it does not import the
        client."""
        from importlib.util import find_spec

        # `from swapd import spawn` asks here first, before it imports the submodule
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
            import swapd_client

            if name in swapd_client.__all__ or name in swapd_client.RENAMED:
                return getattr(swapd_client, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        import swapd_client

        return sorted({*globals(), *swapd_client.__all__})
