"""`swapd doctor`: checks of this machine, with advice."""

import sys

from rich.console import Group
from rich.table import Table
from rich.text import Text

from swapd import doctor as checks
from swapd.cli.common import Json, show
from swapd.cli.target import ChosenDaemon
from swapd.doctor import Check
from swapd.shared import daemons
from swapd.shared.text import counted

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def doctor(daemon: ChosenDaemon, json: Json = False) -> None:
    """Check this machine, and each daemon of this user, unless one is chosen.

    Ends with status 1 if a required part is missing.
    """
    try:
        folders = [daemon.folder]
    except daemons.SeveralDaemons:
        folders = [one.folder for one in daemons.running() if not one.unreachable]
    found = checks.examine(folders, daemon.timeout)
    show(found, _page, json=json)
    if any(check.status == "fail" for check in found):
        sys.exit(1)


def _page(found: list[Check]) -> Group:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for check in found:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n-> {check.advice}", "dim" if check.status == "ok" else "yellow")
        table.add_row(Text(*_MARKS[check.status]), check.name, text)
    return Group(table, _verdict(found))


def _verdict(found: list[Check]) -> Text:
    missing = [check.name for check in found if check.status == "fail"]
    if missing:
        return Text(f"\nswapd does not run here: {', '.join(missing)}", "bold red")
    warned = sum(check.status == "warn" for check in found)
    rest = f"; {counted(warned, 'warning')}" if warned else ""
    return Text(f"\nnothing needed is missing{rest}", "green")
