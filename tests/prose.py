"""Checks the style of prose: `python -m tests.prose [PATH ...]` prints the sentences to reword.

It reads Markdown without its code, the help texts of `swapd`, and the docstrings and comments of
Python files; in the product, their messages, too. `RULES` has the rules, and `EXCEPTIONS` the
exceptions.
"""

import ast
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
    "(?:ask|check|choose|compare|decide|explain|know|learn|list|measure|name|print|read|record|"
    "repeat|say|see|show|state|tell)s?|asking|saying|showing|knowing|knew|learned|said|told|nobody"
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
#: Code whose strings users read.
PRODUCT = ("swapd/", "client/")
#: Nodes of a syntax tree that may contain statements, or are some.
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
#: In Python code: `tokenize` takes fifteen times as long.
STRING_OR_COMMENTS = re.compile(
    r"""("{3}|'{3})(?s:\\.|[^\\])*?\1|"(?s:\\.|[^"\\\n])*"|'(?s:\\.|[^'\\\n])*'"""
    r"|(?P<comments>#.*(?:\n[ \t]*#.*)*)"
)


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


def texts() -> dict[str, str]:
    """The prose of each file of the tree, and of all help, by name."""
    found = {HELP: "\n\n".join(_help_of(typer.main.get_command(app)))}
    for path in _files():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if path.suffix == ".py":
            tree = ast.parse(text)
            strings = _messages(tree) if name.startswith(PRODUCT) else ()
            text = "\n\n".join([*_docstrings(tree), *_comments(text), *strings])
        found[name] = text
    return found


def _files() -> Iterator[Path]:
    """All files, without git: an unpacked sdist has no repository."""
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in MADE]
        yield from (Path(folder, name) for name in files if name.endswith((".md", ".py")))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner: list[ast.AST] = [tree]
    for node in inner:  # it grows: without expressions, which are most of a tree
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""
        inner += [below for below in ast.iter_child_nodes(node) if isinstance(below, STATEMENTS)]


def _comments(source: str) -> Iterator[str]:
    """Each comment; adjacent lines are one comment."""
    for found in STRING_OR_COMMENTS.finditer(source):
        if found["comments"]:
            lines = (line.strip().lstrip("#:! ") for line in found["comments"].split("\n"))
            yield " ".join(re.sub(r"(noqa|type: ignore|pragma:).*", "", line) for line in lines)


def _messages(tree: ast.Module) -> Iterator[str]:
    """Strings with a space, without docstrings; values in an f-string read `CODE`."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    inner = [n for s in statements if not _documents(s) for n in ast.iter_child_nodes(s)]
    for node in (one for top in inner if not isinstance(top, ast.stmt) for one in ast.walk(top)):
        if " " in (text := _text_of(node).strip()):  # one word is a key or a name
            yield text


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text_of(part) if isinstance(part, ast.Constant) else "CODE" for part in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _documents(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _help_of(command: Any) -> Iterator[str]:
    """The help of a command, its options and its subcommands; typer has a click of its own."""
    yield (command.help or "").replace("\b", "")
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    for below in getattr(command, "commands", {}).values():
        yield from _help_of(below)


def main(names: list[str]) -> int:
    """Print the problems of the paths named, or of all files; 1 if there are any."""
    prose = texts()
    checked = [name for name in sorted(prose) if name.startswith(tuple(names or [""]))]
    found = [f"{name}: {problem}\n" for name in checked for problem in problems(prose[name])]
    sys.stdout.writelines(found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
