"""The kept comparisons of `swapd run --compare`: their tables, and their files in one folder."""

import shlex
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from swapd.cli.common import columns, console, note, say, say_error
from swapd.run import comparison
from swapd.run.comparison import Comparison
from swapd.shared import config
from swapd.shared.text import plain

_LISTED_MAX = 20


def table(found: Comparison) -> RenderableType:
    headings = ("", *(plain(side.name) for side in found.sides), "ratio")
    count = max(len(side.rounds) for side in found.sides)
    about = f"medians of {count} rounds; {comparison.ABOUT}" if count > 1 else comparison.ABOUT
    return Group(columns(headings, comparison.rows(found), left=("",)), Text(about, "dim"))


def _folder() -> Path:
    return config.state_folder() / "comparisons"


def write(name: str, suffix: str, data: bytes, use: str) -> None:
    path = _folder() / f"{name}{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
    except OSError as exc:
        say_error(f"{path} is not written: {exc.strerror}; $XDG_STATE_HOME names another place")
    else:
        note(f"{path}: {use}")


def list_all() -> None:
    paths = sorted(_folder().glob("*.json"))[-_LISTED_MAX:]
    if not paths:
        console.print("nothing was compared yet; start with: swapd run --compare -- COMMAND")
    for path in paths:
        try:
            found = comparison.decoded(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as exc:
            say_error(f"{path} cannot be read: {exc}; remove it")
            continue
        say(f"{path.stem}  status {found.status}  {shlex.join(found.command)}")
        console.print(table(found))
        if (settings := path.with_suffix(".toml")).exists():
            say(f"the better settings: {settings}")
