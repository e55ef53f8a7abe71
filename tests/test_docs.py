"""What stands on pages works: programs run, commands parse, links resolve.

`make docs` checks the links of the site; these tests check those of all pages in the tree.
"""

import inspect
import json
import re
import runpy
import shlex
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
import typer.main

import swapd_client
from swapd import spawn
from swapd.cli.app import app_of
from swapd.device.context import NEEDED_VERSION
from swapd_client import errors
from tests.processes import ROOT, output_of, run_python, start_python

FILES = sorted(
    path
    for top in ("*.md", ".github/**/*.md", "[cdbst]*/**/*.md")
    for path in ROOT.glob(top)
    if path.name != "CHANGELOG.md" and "build" not in path.parts  # it describes the past
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Code between fences."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.splitlines()[0].strip()


def blocks(language: str) -> Iterator[Block]:
    for path in FILES:
        for found in FENCED.finditer(path.read_text()):
            if found[1] == language:
                yield Block(str(path.relative_to(ROOT)), language, found[2])


# --- programs ------------------------------------------------------------------------------

#: The output of the whole programs, by page.
PROGRAMS = {
    "docs/guides/asyncio.md": "(2048,)\n",
    "docs/guides/replicas.md": (
        "16 MiB of host copies for 2 replicas\n18 MiB of the device for both\n"
    ),
}
TUTORIAL = "docs/tutorial.md"
PYTHON = list(blocks("python"))
FIRST_PAGES = ("README.md", "docs/calls.md")


@pytest.mark.parametrize(
    "program",
    [block.text for page in FIRST_PAGES for block in PYTHON if block.page == page],
    ids=["first page", "attach", "by hand"],
)
def test_the_quick_start_runs_as_printed(program: str) -> None:
    with spawn.daemon(budget="256MiB") as daemon:
        said = output_of(program, env={"SWAPD_ENDPOINT": str(daemon.folder)})
    assert said == "5 evictions, 0 bytes copied back\n"


@pytest.mark.parametrize("page", PROGRAMS)
def test_a_program_runs_as_printed(page: str) -> None:
    (program,) = [block.text for block in PYTHON if block.page == page]
    with spawn.daemon(budget="64MiB") as daemon:
        said = output_of(program, env={"SWAPD_ENDPOINT": str(daemon.folder)})
    assert said == PROGRAMS[page]


def test_the_page_about_ray_serve_shows_the_program_that_make_test_services_runs() -> None:
    """Not run here: Ray is in an environment of its own."""
    (shown,) = [block.text for block in PYTHON if block.page == "docs/guides/ray-serve.md"]
    assert shown in (ROOT / "examples/ray_serve.py").read_text()


def test_the_tutorial_runs_in_two_processes() -> None:
    """With fewer requests: each is a swap of 160 MiB."""
    (program,) = [b.text for b in PYTHON if b.page == TUTORIAL and b.first == "import sys"]
    short = program.replace("range(100)", "range(3)")
    assert short != program
    with spawn.daemon(budget="256MiB") as daemon, ExitStack() as ended:
        stages = {
            name: ended.enter_context(
                start_python(short, name, env={"SWAPD_ENDPOINT": str(daemon.folder)})
            )
            for name in ("encoder", "decoder")
        }
        for name, stage in stages.items():
            assert stage.communicate()[0] == f"{name} is done, 0 bytes were copied back\n"


def test_the_mistake_of_the_tutorial_names_the_component_as_the_process_ends() -> None:
    program, mistake = (b.text for b in PYTHON if b.page == TUTORIAL)
    whole = program.replace("range(100)", "range(1)") + mistake
    with spawn.daemon(budget="256MiB") as daemon:
        done = run_python(whole, "encoder", env={"SWAPD_ENDPOINT": str(daemon.folder)})
    assert done.returncode == -signal.SIGSEGV
    assert "swapd: a fault in component 'encoder'" in done.stderr


MISTAKES = re.findall(
    r"^\| `(client\.[^`]+|swapd\.[^`]+)`( under a lease)? \| `([^`]+)` \|$",
    (ROOT / "docs/mistakes.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("call", "lease", "says"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_says_what_its_page_says(call: str, lease: str, says: str) -> None:
    program = f"""
        import contextlib
        import swapd, torch
        client = swapd.connect()
        model = torch.nn.Linear(2048, 2048)
        client.register("talker", model)
        with client.acquire("talker") if {bool(lease)} else contextlib.nullcontext():
            try:
                {call}
            except swapd.SwapdError as exc:
                print(f"{{type(exc).__name__}}: {{exc}}")
    """
    with spawn.daemon(budget="256MiB") as daemon:
        said = output_of(program, env={"SWAPD_ENDPOINT": str(daemon.folder)})
    holder = re.compile(r"by \S+ \(session \d+\)")
    assert holder.sub("by X", said.replace("`", "").strip()) == holder.sub("by X", says)


# --- commands ------------------------------------------------------------------------------

COMMANDS = typer.main.get_command(app_of())


def commands() -> Iterator[list[str]]:
    """The words of each command on a page, without the syntax of the shell."""
    for block in blocks("console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith(("$ ", "# ")):
                yield from _words(line[2:])
    for path in FILES:
        for command in re.findall(r"^\| `(swapd [^`]+)` \|", path.read_text(), re.MULTILINE):
            yield from _words(command)


def _words(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            if words:
                yield words
            words = []
        else:
            words.append(word)


TYPED = list(commands())


def test_commands_of_swapd_are_understood() -> None:
    ours = [words[1:] for words in TYPED if words[0].endswith("swapd")]
    assert len(ours) > 40
    for words in ours:
        context = COMMANDS.make_context("swapd", list(words), resilient_parsing=False)
        assert isinstance(COMMANDS, typer.core.TyperGroup)
        name, command, rest = COMMANDS.resolve_command(context, words)
        assert command is not None
        command.make_context(name, rest, parent=context)


# --- the reference -------------------------------------------------------------------------

ERRORS = {name for name, one in vars(errors).items() if isinstance(one, type)}


def test_the_reference_links_each_error_that_a_docstring_names_and_keeps_all_words() -> None:
    shown: Callable[[str], str] = runpy.run_path(str(ROOT / "docs/raises.py"))["shown"]
    link = re.compile(r"\[`(\w+)`\]\[swapd_client\.errors\.\1\]")
    members = [*vars(swapd_client.Client).values(), *vars(swapd_client.Lease).values()]
    methods = [one for one in members if callable(one) or isinstance(one, property)]
    docstrings = [inspect.getdoc(one) or "" for one in (swapd_client.connect, *methods)]
    assert sum("Raises:" in text for text in docstrings) > 10
    for text in docstrings:
        page = shown(text)
        named = [word for word in re.findall(r"`[^`]*`|\w+", text) if word in ERRORS]
        assert link.findall(page) == named
        assert len(re.findall(r"Raises:\s", text)) == page.count("\n\n**Raises:** ")
        assert link.sub(r"\1", page).replace("**", "").split() == text.split()


# --- what is needed ------------------------------------------------------------------------

PAGE_OF_THE_DRIVER = "docs/operations/gpu.md"


def test_pages_name_one_driver_that_is_needed_and_one_page_what_the_code_refuses() -> None:
    pages = {str(path.relative_to(ROOT)): " ".join(path.read_text().split()) for path in FILES}
    needed = {
        page: set(re.findall(r"driver for CUDA ([\d.]+\d|\d+)", text))
        for page, text in pages.items()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (major,) = re.findall(r"cuda-bindings>=(\d+)", str(project["optional-dependencies"]["cuda"]))
    assert {page for page, said in needed.items() if said} >= {"README.md", PAGE_OF_THE_DRIVER}
    assert [page for page, said in needed.items() if said - {major}] == []
    refused = re.compile(r"before CUDA ([\d.]+\d)")
    least = f"{NEEDED_VERSION // 1000}.{NEEDED_VERSION % 1000 // 10}"
    found = {page: refused.findall(text) for page, text in pages.items() if refused.search(text)}
    assert found == {PAGE_OF_THE_DRIVER: [least]}


def test_the_page_about_isolation_has_the_figures_of_the_results() -> None:
    page = " ".join((ROOT / "docs/isolation.md").read_text().split())
    results = json.loads((ROOT / "benchmarks/results/nvidia-h200-2026-11-28.json").read_text())
    rows = {row["name"]: row["value"] for row in results["rows"]}
    hits = [rows[f"strict hit of 8 GiB, by {chunk} MiB"] for chunk in (64, 256)]
    out = {round(rows[f"eviction of a clean component of 8 GiB, by {n} MiB"], 1) for n in (64, 256)}
    assert re.findall(r"([\d.]+) ms\b", page) == [*(f"{ms:.1f}" for ms in hits), *map(str, out)]
    costs = (ROOT / "docs/costs.md").read_text()
    (idle,) = re.findall(r"the calls alone, idle stream; .* \| (\d+);", costs)
    assert f"{idle} us on an idle stream" in page


# --- links ---------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of its headings: GitHub's, and those of mkdocs by `slugify` in mkdocs.yml."""
    text = FENCED.sub("", path.read_text())
    seen: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = anchor = re.sub(r"[^\w\- ]", "", plain).lower().replace(" ", "-")
        number = 0
        while anchor in seen:
            number += 1
            anchor = f"{name}-{number}"
        seen.add(anchor)
    return seen


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in LINK.findall(FENCED.sub("", path.read_text())):
        if "://" in target:
            continue
        name, _, anchor = unquote(target).partition("#")
        to = (path.parent / name).resolve() if name else path
        assert to.exists(), target
        if anchor:
            to = to / "README.md" if to.is_dir() else to
            assert anchor in anchors(to), target
