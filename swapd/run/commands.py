"""Tells the kind of a command line, and sets the options that make it use swapd. Pure."""

import re
from collections.abc import Sequence
from math import prod
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import msgspec

from swapd.plan import offload_flags
from swapd.shared.config import ConfigError
from swapd_client.offload.settings import OffloadSettings
from swapd_client.vllm.options import name_of_model

Kind = Literal["vllm", "vllm-omni", "other"]

WORKER_CLS = "--worker-cls"
DEPLOY_CONFIG = "--deploy-config"
ADDITIONAL = "--additional-config"
_OMNI = "--omni"
_MODEL = "--model"
_SHARDS = ("--tensor-parallel-size", "-tp")
_PIPELINE = ("--pipeline-parallel-size", "-pp")
_SHARDS_MAX = 1024
_ROUND = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")


class Command(NamedTuple):
    words: tuple[str, ...]
    kind: Kind
    #: Offloading flags that vllm-omni does not know; `words` lacks them.
    offload: OffloadSettings = OffloadSettings()

    @property
    def model(self) -> str | None:
        """The served model; None if the words do not name it in the usual places."""
        if self.kind == "other":
            return None
        if named := option(self.words, _MODEL):
            return named
        after = self.words[self.words.index("serve") + 1 :]
        return after[0] if after and not after[0].startswith("-") else None

    def with_option(self, name: str, *value: str) -> "Command":
        """Return the command with an option set to `value`. Without a value, add a flag that is
        absent."""
        words = without(self.words, name)
        after = words.index("serve") + 1
        at = after + (self.model in words[after : after + 1])
        return self._replace(words=(*words[:at], name, *value, *words[at:]))


def command_of(words: Sequence[str]) -> Command:
    """Return the command with its kind.

    `vllm serve` may also be run by `python -m`, and `vllm-omni --model M ...` without `serve` is a
    server, too. Raises: ConfigError.
    """
    program, *rest = words
    has_name = PurePath(program).name == "vllm-omni"
    if has_name and rest and rest[0].startswith("-") and option(rest, _MODEL):
        omni = [_OMNI] if _OMNI not in rest else []
        words = [program, "serve", *rest, *omni]
    if (kind := _kind(words)) == "other":
        return Command(tuple(words), kind)
    after = list(words).index("serve") + 1
    words = (*words[:after], *map(_dashed, words[after:]))
    if kind == "vllm":
        return Command(words, kind)
    offload, left = offload_flags.taken_off(words)
    return Command(left, kind, offload)


def _dashed(word: str) -> str:
    """Return a word as vLLM reads it, to which --max_model_len is --max-model-len."""
    name, dot, rest = word.partition(".")
    name, equals, value = name.partition("=")
    dashed = name.replace("_", "-") if name.startswith("--") else name
    return f"{dashed}{equals}{value}{dot}{rest}"


def _kind(words: Sequence[str]) -> Kind:
    program, *rest = words
    name = PurePath(program).name
    if name.startswith("python") and len(rest) > 1 and rest[0] == "-m":
        name, rest = rest[1].partition(".")[0].replace("_", "-"), rest[2:]
    if name not in ("vllm", "vllm-omni") or "serve" not in rest[:1]:
        return "other"
    return "vllm-omni" if name == "vllm-omni" or _OMNI in rest else "vllm"


def component_of(command: Command) -> str:
    found = additional_of(command).get("swapd")
    named = found.get("component") if isinstance(found, dict) else None
    return str(named or name_of_model(command.model or ""))


def additional_of(command: Command) -> dict[str, Any]:
    """Return the `additional_config` of a plain vLLM server; {} if it cannot be read."""
    said = option(command.words, ADDITIONAL) or "{}"
    try:
        return msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}  # vLLM reports it


def division_of(command: Command) -> tuple[int, int]:
    """Return how many processes of a plain vLLM server divide its heads, and its layers: 1 each for
    other commands. Raises: ConfigError."""
    if command.kind != "vllm":
        return 1, 1
    return _size(command, *_SHARDS), _size(command, *_PIPELINE)


def shards_of(command: Command) -> int:
    """Return the number of GPUs that share the weights. Raises: ConfigError."""
    return prod(division_of(command))


def _size(command: Command, name: str, short: str) -> int:
    said = option(command.words, name) or option(command.words, short) or "1"
    if not said.isdecimal() or not 0 < int(said) <= _SHARDS_MAX:
        raise ConfigError(f"{name} {said}: say a number of GPUs, 1 or more")
    return int(said)


def number_of(said: str) -> int:
    """Return a number as vLLM reads it: 4k is 4000, and 4K is 4096. Raises: ValueError."""
    if (found := _ROUND.fullmatch(said.strip())) is None:
        return int(said)
    digits, unit = found.groups()
    power = "kmgt".index(unit.lower()) + 1
    return int(float(digits) * 1000**power) if unit.islower() else int(digits) * 1024**power


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value in `--name value` or `--name=value`; the last one wins."""
    found = None
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def without(words: Sequence[str], name: str) -> tuple[str, ...]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return tuple(kept)
