"""What a command line runs, and what is added so that it uses swapd. Pure."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import msgspec

from swapd.shared.config import ConfigError

#: What is known of a command: vLLM's server, that of vLLM-Omni, or nothing.
Kind = Literal["vllm", "vllm-omni", "other"]

WORKER_CLS = "--worker-cls"
DEPLOY_CONFIG = "--deploy-config"
_OMNI = "--omni"
_MODEL = "--model"
_SHARDS = "--tensor-parallel-size"
_SHARDS_MAX = 1024
_ADDITIONAL = "--additional-config"


class Command(NamedTuple):
    """A command line, less what runs it with swapd."""

    words: tuple[str, ...]
    kind: Kind

    @property
    def model(self) -> str | None:
        """The model that is served; None if that is not said where swapd looks."""
        if self.kind == "other":
            return None
        if named := option(self.words, _MODEL):
            return named
        after = self.words[self._serve + 1 :]
        return after[0] if after and not after[0].startswith("-") else None

    @property
    def _serve(self) -> int:
        return self.words.index("serve")

    def with_option(self, name: str, value: str) -> "Command":
        """With an option of its own, in place of what it said."""
        words = without(self.words, name)
        after = words.index("serve") + 1
        at = after + (self.model in words[after : after + 1])
        return self._replace(words=(*words[:at], name, value, *words[at:]))


def command_of(words: Sequence[str]) -> Command:
    """Which kind of command this is: `vllm serve ...`, also by `python -m`, or another."""
    return Command(tuple(words), _kind(words))


def _kind(words: Sequence[str]) -> Kind:
    program, *rest = words
    name = PurePath(program).name
    if name.startswith("python") and len(rest) > 1 and rest[0] == "-m":
        name, rest = rest[1].partition(".")[0].replace("_", "-"), rest[2:]
    if name not in ("vllm", "vllm-omni") or "serve" not in rest[:1]:
        return "other"
    return "vllm-omni" if name == "vllm-omni" or _OMNI in rest else "vllm"


def component_of(command: Command) -> str:
    """What a server of plain vLLM is called in swapd, as its worker finds it."""
    said = option(command.words, _ADDITIONAL) or "{}"
    try:
        found = msgspec.json.decode(said, type=dict[str, Any]).get("swapd")
    except msgspec.MsgspecError:
        found = None  # vLLM says so
    named = found.get("component") if isinstance(found, dict) else None
    return str(named or PurePath(command.model or "").name)


def shards_of(command: Command) -> int:
    """Among so many GPUs a server of plain vLLM divides its weights. Raises: ConfigError."""
    said = option(command.words, _SHARDS) or option(command.words, "-tp") or "1"
    if not said.isdecimal() or not 0 < int(said) <= _SHARDS_MAX:
        raise ConfigError(f"{_SHARDS} {said}: say a number of GPUs, 1 or more")
    return int(said)


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def without(words: Sequence[str], name: str) -> tuple[str, ...]:
    """All but an option and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return tuple(kept)
