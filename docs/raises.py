"""The reference: what a call raises stands in a paragraph of its own, with links to the errors.

mkdocs.yml names this file as an extension of griffe, which reads the docstrings. Sections of
Google's style would need a text for each error in each docstring, and most have their remedy in
the error's own entry.
"""

import re
from pathlib import Path
from typing import Any

import griffe

_SOURCE = Path(__file__).parent.parent / "client" / "swapd_client" / "errors.py"
_ERRORS = re.findall(r"^class (\w+)\(", _SOURCE.read_text(), re.MULTILINE)
#: Code, which stays; or the name of an error.
_NAMED = re.compile(rf"`[^`]*`|\b({'|'.join(_ERRORS)})\b")
_RAISES = re.compile(r"(?:^|\s+)Raises:\s+")


class Raises(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)


def shown(docstring: str) -> str:
    """The docstring with its errors as links, and `Raises:` at the beginning of a paragraph."""
    return _NAMED.sub(_link, _RAISES.sub("\n\n**Raises:** ", docstring))


def _link(found: re.Match[str]) -> str:
    name = found[1]
    return found[0] if name is None else f"[`{name}`][swapd_client.errors.{name}]"
