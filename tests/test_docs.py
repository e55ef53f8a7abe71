"""The pages are right: programs run, commands parse, links resolve.

`make docs` checks the links of the site; these tests check those of all pages in the tree.
"""

import ast
import inspect
import json
import re
import shlex
import signal
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple
from urllib.parse import unquote

import pytest
import typer.main
import yaml

import swapd_client
from swapd import spawn
from swapd.cli.app import app
from swapd_client import errors
from tests import test_readme
from tests.offload import test_page
from tests.processes import ROOT, output_of, run_python, start_python

FILES = sorted(
    path
    for top in ("*.md", "[cdbst]*/**/*.md")
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

#: Other tests run these programs, unchanged.
RUN_ELSEWHERE = {*test_readme.PROGRAMS, *test_page.PROGRAMS}
#: The output of the whole programs, by page.
PROGRAMS = {
    "docs/guides/asyncio.md": "(2048,)\n",
    "docs/guides/replicas.md": "16 MiB of host copies for 2 replicas\n",
}
TUTORIAL = "docs/tutorial.md"
#: Partial programs, by first line, with the missing part. The tests check their calls without a
#: run.
PARTS = {
    "import swapd": "a pipeline",
    "from swapd_client.offload import settings": "a settings file, and the parser of a program",
    'with torch.device("meta"):': "a checkpoint, and the class of its model",
    'client.update("talker", new_state_dict)  # all at once; the next acquire sees it': "weights",
    "model = peft.get_peft_model(model, peft.LoraConfig(...))": "a model, and what to train it on",
    'attachment = client.attach(model, wrap_methods={"vae": ["_decode_tile"]})': "a model",
    'gpu = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]': "an actor, and a GPU",
    "from tests import fakecuda": "a test",
}
PYTHON = list(blocks("python"))
CALLED_ON = {
    "swapd_client": swapd_client,
    "client": swapd_client.Client,
    "first": swapd_client.Client,
    "second": swapd_client.Client,
    "attachment": swapd_client.Attachment,
}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page)
def test_every_program_is_run_or_named_with_what_it_lacks(block: Block) -> None:
    run = block.text in RUN_ELSEWHERE or block.page in PROGRAMS
    if not run and block.page != TUTORIAL:
        assert block.first in PARTS


def test_no_part_is_named_that_is_gone() -> None:
    assert PARTS.keys() <= {block.first for block in PYTHON}
    assert {*PROGRAMS, TUTORIAL} <= {block.page for block in PYTHON}


@pytest.mark.parametrize("page", PROGRAMS)
def test_a_program_runs_as_printed(page: str) -> None:
    (program,) = [block.text for block in PYTHON if block.page == page]
    with spawn.daemon(budget="64MiB") as daemon:
        said = output_of(program, env={"SWAPD_ENDPOINT": str(daemon.folder)})
    assert said == PROGRAMS[page]


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


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page)
def test_calls_that_are_shown_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(dedent(block.text))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        on = node.func.value
        if isinstance(on, ast.Name) and on.id in CALLED_ON:
            called = getattr(CALLED_ON[on.id], node.func.attr)
            takes = inspect.signature(called).parameters
            if all(each.kind is not each.VAR_KEYWORD for each in takes.values()):
                assert {word.arg for word in node.keywords if word.arg} <= takes.keys()


def test_calls_of_the_table_exist() -> None:
    faces = (swapd_client.Client, swapd_client.AsyncClient, swapd_client.Attachment)
    page = (ROOT / "docs" / "calls.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(cells) > 15
    for name in re.findall(r"`(?:attachment\.)?(\w+)\(", " ".join(cells)):
        assert any(hasattr(face, name) for face in faces), name


def test_both_clients_have_the_same_calls() -> None:
    sync, awaited = (
        {name for name in dir(face) if not name.startswith("_")}
        for face in (swapd_client.Client, swapd_client.AsyncClient)
    )
    assert sync == awaited


# --- commands ------------------------------------------------------------------------------

COMMANDS = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


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


def test_options_that_the_text_names_exist() -> None:
    """Code in a sentence may leave arguments out, so it cannot be parsed."""
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    for path in FILES:
        text = FENCED.sub("", path.read_text())
        for said in re.findall(r"`swapd ([a-z]+)((?: [^`]*)?)`", text):
            command = COMMANDS.commands[said[0]]
            known = {option for each in command.params for option in each.opts} | {"--help", "-h"}
            named = re.findall(r"(?<!\S)--[a-z][a-z-]*", said[1].partition(" -- ")[0])
            assert set(named) <= known, (path, said)


def test_targets_and_modules_that_are_shown_exist() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    assert set(re.findall(r"(?:^\$ |`)make ([a-z][\w-]*)", text, re.MULTILINE)) <= TARGETS
    for module in re.findall(r"python -m ((?:benchmarks|tests|swapd)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for program in re.findall(r"python ((?:examples|docs)/\S+\.py)", text):
        assert (ROOT / program).exists(), program


def test_pip_lines_install_the_source_tree_with_extras_that_there_are() -> None:
    lines = re.findall(r"pip install [^`\n]*", "\n".join(path.read_text() for path in FILES))
    assert len(lines) > 5
    for line in lines:
        assert "'swapd[" not in line, "nothing is published"
        for extras in re.findall(r"[./]\S*\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= EXTRAS.keys(), line


def test_the_page_has_each_command_and_says_which_take_json() -> None:
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    page = (ROOT / "docs" / "commands.md").read_text()
    (names,) = re.findall(r"\n\n((?:`\w+`[, and\n]*)+) take `--json`", page)
    have = {
        name
        for name, command in COMMANDS.commands.items()
        if any("--json" in each.opts for each in command.params)
    }
    assert set(re.findall(r"`(\w+)`", names)) == have
    shown = {name for name, command in COMMANDS.commands.items() if not command.hidden}
    assert set(re.findall(r"`swapd (\w+)", page)) == shown, "each has its line"


def test_each_error_has_its_cause_and_its_remedy() -> None:
    page = (ROOT / "docs" / "operations" / "troubleshooting.md").read_text()
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", page, re.M))))
    kinds = {name for name, kind in vars(errors).items() if _is_an_error(kind)}
    assert kinds - {"SwapdError", "SessionEnded"} <= named, "these two are bases of others"


def _is_an_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.SwapdError)


#: Questions on the first pages, each with one page that answers it under that heading.
QUESTIONS = (
    "What is it?",
    "Will it work for me?",
    "How do I install it?",
    "What happens when it fails?",
    "How fast is it?",
)


@pytest.mark.parametrize("first", ["README.md", "docs/index.md"])
def test_each_question_has_one_page_that_answers_it(first: str) -> None:
    path = ROOT / first
    for question in QUESTIONS:
        (answer,) = re.findall(rf"^\| {re.escape(question)} \| ([^|]*) \|", path.read_text(), re.M)
        target = re.findall(LINK, answer)[0]
        assert (path.parent / target).read_text().startswith(f"# {question}\n")


def test_figures_of_the_first_page_are_those_of_the_pages_behind_it() -> None:
    pages = ("docs/costs.md", "benchmarks/README.md", "client/README.md")
    there = "".join((ROOT / page).read_text() for page in pages)
    _, _, table = test_readme.README.partition("\n## Measured\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ][2:]
    assert len(rows) > 5
    for what, ours, beside, command in rows:
        assert re.fullmatch(r"`(swapd bench|python -m benchmarks\.\w+)`", command), what
        for figure in re.findall(r"\d[\d.]*", f"{ours} {beside}"):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", there), (what, figure)


# --- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=lambda block: block.page)
def test_settings_that_are_shown_can_be_read(block: Block) -> None:
    read = yaml.safe_load(block.text)
    assert isinstance(read, (dict, list))
    stages = read.get("stages", []) if isinstance(read, dict) else []
    for stage in stages:
        assert isinstance(stage["stage_id"], int)
        for key in stage.keys() & {"worker_cls", "worker_extension_cls"}:
            module, _, name = stage[key].rpartition(".")
            source = (ROOT / "client" / module.replace(".", "/")).with_suffix(".py")
            assert f"class {name}" in source.read_text()


@pytest.mark.parametrize("block", list(blocks("json")), ids=lambda block: block.page)
def test_records_that_are_shown_are_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


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
