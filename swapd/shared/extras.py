"""The optional dependencies (extras), and the error when one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from swapd.shared.errors import UserError

EXTRA_OF = {
    "torch": "torch",
    "tqdm": "torch",
    "yaml": "torch",
    "uvloop": "daemon",
    "typer": "daemon",
    "rich": "daemon",
    "h11": "web",
    "prometheus_client": "web",
    "numpy": "numpy",
    "cuda": "cuda",
    "pynvml": "cuda",
    "transformers": "demo",
    "textual": "top",
    "opentelemetry": "otel",
}


class MissingExtra(UserError, ModuleNotFoundError):
    """The message names the extra to install."""


@contextmanager
def needed(what: str) -> Iterator[None]:
    """Wrap imports that `what` needs. Raises: MissingExtra."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if isinstance(exc, MissingExtra) or (extra := extra_of(exc)) is None:
            raise
        raise MissingExtra(
            f"{what} needs {exc.name}, which is not installed: pip install 'swapd[{extra}]'",
            name=exc.name,
        ) from exc


def extra_of(error: ModuleNotFoundError) -> str | None:
    return EXTRA_OF.get((error.name or "").partition(".")[0])
