"""Files that tests write."""

from pathlib import Path


def file_with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
