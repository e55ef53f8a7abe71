"""Where the model of a server is: in the folder that it names, or in the cache of Hugging Face."""

from pathlib import Path

from swapd.plan import hub
from swapd.run.commands import Command, option

#: Options of vLLM: another cache, and another revision than the main one.
_CACHE = "--download-dir"
_REVISION = "--revision"


def folder_of(command: Command) -> Path:
    """The folder of the model of a server of vLLM, which names one. Raises: NotInCache."""
    assert command.model is not None
    cache = option(command.words, _CACHE)
    revision = option(command.words, _REVISION)
    return hub.folder_of(command.model, revision, Path(cache) if cache else None)
