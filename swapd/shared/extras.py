"""What an extra of this package installs, and what to say when it is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

#: By module, the extra that brings it.
EXTRA_OF = {
    "torch": "torch",
    "tqdm": "torch",
    "yaml": "torch",
    "uvloop": "daemon",
    "typer": "daemon",
    "rich": "daemon",
    "starlette": "web",
    "uvicorn": "web",
    "prometheus_client": "web",
    "numpy": "numpy",
    "cuda": "cuda",
    "pynvml": "cuda",
    "transformers": "demo",
    "textual": "top",
    "opentelemetry": "otel",
}


class MissingExtra(ModuleNotFoundError):
    """A module is not installed that an extra brings; the message says which."""


@contextmanager
def needed(what: str) -> Iterator[None]:
    """A `with` block that imports what an extra brings, for `what`. Raises: MissingExtra."""
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
    """The extra that brings what could not be imported; None if none does."""
    return EXTRA_OF.get((error.name or "").partition(".")[0])
