"""The long description of the package: README.md without links into the source tree.

hatchling runs this file whenever it reads the metadata. A package index shows the description
alone, where a relative link or picture would lead nowhere.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ELSEWHERE = r"(?:[a-z]+:)?//|mailto:"
_LINK = re.compile(rf"(`[^`]*`)|(!?)\[([^\]]*)\]\((?!{_ELSEWHERE})[^)]*\)")
_ANCHOR = re.compile(rf'<a [^>]*href="(?!{_ELSEWHERE})[^"]*"[^>]*>(.*?)</a>', re.DOTALL)
_PICTURE = re.compile(r"<picture>.*?</picture>\n?", re.DOTALL)
_IMAGE = re.compile(rf'<img [^>]*src="(?!{_ELSEWHERE})[^"]*"[^>]*>\n?')


class CustomMetadataHook(MetadataHookInterface):
    """Fills `readme`, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description. Reads README.md beside pyproject.toml."""
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text)}


def standalone(text: str) -> str:
    """The page without relative pictures; of a relative link, its words. Code stays as it is."""
    parts = _FENCED.split(text)
    parts[::2] = map(_without_links, parts[::2])
    return "".join(parts)


def _without_links(text: str) -> str:
    text = _IMAGE.sub("", _PICTURE.sub("", text))
    return _LINK.sub(_words, _ANCHOR.sub(r"\1", text))


def _words(link: re.Match[str]) -> str:
    code, image, words = link.groups()
    return code or ("" if image else words)
