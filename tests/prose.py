"""Checks the style of prose: `python -m tests.prose [PAGE ...]` prints the sentences to reword.

It reads Markdown without its code, and the help texts of `swapd`. Rules are in `RULES`, exceptions
in `EXCEPTIONS`, and pages that do not comply yet in `UNCHECKED`.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from swapd.cli.app import app

ROOT = Path(__file__).parent.parent
#: Folders that `make` fills.
MADE = {"build", "dist"}
HELP = "swapd --help"
WORDS_MAX = 40
#: Verbs after which an indirect question is good English: "the log says what was evicted".
_SAYS = (
    "(?:ask|check|choose|compare|decide|explain|know|list|measure|name|print|read|record|repeat|say|"
    "see|show|state|tell)s?|asking|saying|showing|knowing|knew|nobody"
)
_PASSIVE = (
    r"\b(?:is|are|was|were|been|being|be) (?:(?:not|also|then|only|\w+ly) )?(?:\w\w+ed|known|"
    r"written|done|given|held|kept|lent|made|put|read|run|said|seen|sent|shown|taken|told)\b"
)
#: A problem, and its pattern in a sentence, whose code reads `CODE`.
RULES = {
    "a headless 'what': name the noun": (
        rf"(?:^|[,;:(] |\b(?!(?:{_SAYS}) )[\w']+ )(?:what|whatever)\b(?! to )(?!.*\?$)"
    ),
    "a headless 'who': name the actor": (
        r"(?:^|[,;:(] |\b(?:and|but|by|for|from|of|than|that|to|with) )"
        r"(?:who|whoever|whichever)\b(?!.*\?$)"
    ),
    "a chain of passives: name the actor, or split it": rf"{_PASSIVE}[^;:]*{_PASSIVE}",
    "a word of the project's own: see docs/concepts.md": (
        r"\b(?:masters?|nobody waits|no time|put aside|(?:is|of) others'|are thought of|lies)\b"
    ),
    f"over {WORDS_MAX} words": rf"(?:\S+ ){{{WORDS_MAX}}}\S",
}
#: Parts of sentences that stay as they are, and why.
EXCEPTIONS = {
    "What was checked": "heading in deploy/, quoted by tests/test_deploy.py",
    "What was run": "heading in deploy/vllm-omni, quoted by tests/vllm/test_zoo.py",
    "What moves on a GPU": "heading in tests/vllm, quoted by tests/test_tables.py",
}
#: Pages that were not reworded yet. None is added: a page that complies leaves the list.
UNCHECKED = {
    "CHANGELOG.md",
    "benchmarks/README.md",
    "swapd/core/README.md",
    "tests/offload/zoo/README.md",
}


def sentences(markdown: str) -> Iterator[str]:
    """Each sentence, heading, item of a list and cell of a table; code reads `CODE`."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2$|<!--.*?-->", "\n", markdown, flags=re.M | re.S)
    text = re.sub(r"`+[^`]+`+", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^ *(?:#+|[-*>]|\d+\.|:::.*) ", "\n\n", text, flags=re.M)
    text = re.sub(r"^\|.*$", lambda row: f"\n{row[0].replace('|', chr(10) * 2)}", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.replace("**", "").split())
        yield from re.split(r"(?<=[.?!]) (?=[A-Z*\"'(]|swapd )", words)


def problems(markdown: str) -> Iterator[str]:
    """One line for each rule that a sentence breaks."""
    for sentence in sentences(markdown):
        if not any(excepted in sentence for excepted in EXCEPTIONS):
            for problem, pattern in RULES.items():
                if re.search(pattern, sentence, re.IGNORECASE):
                    yield f"{problem}: {sentence}"


def pages() -> dict[str, str]:
    """The text of each page of the tree, and of all help, by name."""
    found = {str(path.relative_to(ROOT)): path.read_text() for path in _markdown()}
    return found | {HELP: "\n\n".join(_help_of(typer.main.get_command(app)))}


def _markdown() -> Iterator[Path]:
    """Not by git: an unpacked sdist has none."""
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in MADE]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


def _help_of(command: Any) -> Iterator[str]:
    """The help of a command, its options and its subcommands; typer has a click of its own."""
    yield (command.help or "").replace("\b", "")
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    for below in getattr(command, "commands", {}).values():
        yield from _help_of(below)


def main(names: list[str]) -> int:
    """Print the problems of the pages named, or of all that are checked; 1 if there are any."""
    texts = pages()
    checked = names or sorted(texts.keys() - UNCHECKED)
    found = [f"{name}: {problem}\n" for name in checked for problem in problems(texts[name])]
    sys.stdout.writelines(found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
