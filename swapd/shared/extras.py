"""The optional dependencies (extras) of this package, and the error when one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from swapd.shared.errors import UserError

#: For each module, the extra that installs it.
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
    """A module of an extra is not installed; the message names the extra."""


@contextmanager
def needed(what: str) -> Iterator[None]:
    """A `with` block that imports modules of an extra, for `what`. Raises: MissingExtra."""
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
    """The extra that installs the missing module; None if there is none."""
    return EXTRA_OF.get((error.name or "").partition(".")[0])
