"""The progress of a load, as a bar or through a callable."""

import sys
from collections.abc import Callable
from typing import Any

#: `told(done, total)`, bytes.
Told = Callable[[int, int], None]


class Progress:
    """Adds up the bytes of all layouts being filled, and reports them. Use it in a `with` block.

    `wanted`: a callable; True, for a bar; None, for a bar if tqdm is installed and stderr is a
    terminal.
    """

    def __init__(self, wanted: bool | Told | None) -> None:
        self._told = wanted if callable(wanted) else None
        self._wants_bar = wanted is True or (wanted is None and sys.stderr.isatty())
        self._bar: Any = None
        self._done = self._total = 0

    def begin(self, nbytes: int) -> None:
        """Announce `nbytes` more bytes."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._told is not None:
            self._told(self._done, self._total)
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> "Progress":
        if self._wants_bar and self._told is None:
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                self._wants_bar = False
            else:
                self._bar = tqdm(
                    initial=self._done,
                    total=self._total,
                    unit="B",
                    unit_scale=True,
                    desc="loading",
                    leave=False,
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
