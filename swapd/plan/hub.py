"""Finds models by their ids (`Qwen/Qwen3-Omni-30B-A3B-Instruct`) in Hugging Face's local cache.

It reads the layout of huggingface_hub, without that library, and downloads nothing.
"""

import re
from pathlib import Path

from swapd.plan.advice import PlanError
from swapd.shared import config
from swapd.shared.documents import read_json

_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)
_COMMIT_BYTES = 100
MAIN = "main"


class NotInCache(PlanError):
    """The cache lacks the model, or part of it; the message says how to get it."""


def cached(model: str, revision: str = MAIN, cache: Path | None = None) -> Path | None:
    """Return the folder of a model's files at a revision (a branch, tag or commit), or None if it
    is not in the cache. `cache`: replaces the cache of the environment."""
    if not _ID.fullmatch(model) or not _REVISION.fullmatch(revision) or ".." in revision:
        return None
    folder = (cache or config.hub_cache()) / f"models--{model.replace('/', '--')}"
    try:
        with (folder / "refs" / revision).open(errors="replace") as file:
            commit = file.read(_COMMIT_BYTES).strip()
    except OSError:
        commit = revision
    if not _REVISION.fullmatch(commit) or "/" in commit or ".." in commit:
        return None
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def folder_of(model: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """`model`: a folder, or an id in the cache. Raises: NotInCache."""
    if (path := Path(model)).is_dir():
        return path
    found = cached(model, revision or MAIN, cache)
    of = f" at revision {revision}" if revision else ""
    get = f"`hf download {model}{f' --revision {revision}' if revision else ''}`"
    if found is None:
        where = cache or config.hub_cache()
        raise NotInCache(
            f"{model}{of} is neither a folder nor in the cache of Hugging Face at {where}: get it "
            f"by {get}, name the model's folder, or set HF_HUB_CACHE to the cache that has it"
        )
    if absent := _absent(found):
        raise NotInCache(f"{model}{of} is in {found} without {absent}: get the rest by {get}")
    return found


def called(folder: Path) -> str:
    """Return the model's name. In the cache that is the name in its id: the folder is a commit."""
    at = folder.parent.parent.name
    if folder.parent.name == "snapshots" and at.startswith("models--"):
        return at.rpartition("--")[2]
    return folder.name


def _absent(folder: Path) -> str:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            read = read_json(index)
        except (OSError, ValueError):
            continue  # sizes.py reports it
        listed = read.get("weight_map") if isinstance(read, dict) else None
        names = sorted({str(name) for name in listed.values()} if isinstance(listed, dict) else ())
        if absent := next((name for name in names if not (folder / name).exists()), None):
            return absent
    return ""
