"""`swapd status` shows the state of a daemon, in words and as JSON."""

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from swapd.cli.status import page
from swapd.shared.protocol import ComponentStatus, ProcessStatus, SessionStatus, Status, WaitStatus
from tests.processes import line_of
from tests.samples import bare

from .conftest import Running, environment, on_terminal, start, swapd

GIB = 1 << 30


def _reply(**changes: Any) -> Status:
    usual = {"device": "host", "loads": 1, "evictions": 2, "hits": 3, "waiting": 0}
    sizes = {"budget_bytes": 40 * GIB, "used_bytes": 30 * GIB, "peak_bytes": 39 * GIB}
    moved = {"bytes_in": 4 * GIB, "bytes_out": 0, "quarantined_bytes": 0}
    nothing: dict[str, Any] = {"components": (), "sessions": ()}
    given = {**usual, **sizes, **moved, **nothing, **changes}
    found: Status = bare(Status)
    return msgspec.structs.replace(found, **given)


def _component(name: str, **changes: Any) -> ComponentStatus:
    usual = {"state": "idle", "policy": "lru", "group": None, "mutable": False, "leases": 0}
    unused = {"holders": (), "idle_s": None, "loads": 0, "evictions": 0, "swap_in_s": None}
    given = {"name": name, "nbytes": 20 * GIB, **usual, **unused, **changes}
    found: ComponentStatus = bare(ComponentStatus)
    return msgspec.structs.replace(found, **given)


def _shown(reply: Status) -> str:
    out = StringIO()
    Console(file=out, width=120).print(page(reply))
    return out.getvalue()


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def _narrow(reply: Status) -> str:
    """The output for 80 columns, with each folded cell of the table joined into one line."""
    out = StringIO()
    Console(file=out, width=80).print(page(reply, wide=False))
    lines = out.getvalue().splitlines()
    heading = next(line for line in lines if line.startswith("component"))
    lefts = (m.start() for m in re.finditer(r"(?<= )(?:state|policy|leases|last)", heading))
    starts = [0, len("the_text_encoder"), *lefts]
    rows = lines[lines.index(heading) + 1 : lines.index("", lines.index(heading))]
    starts[-1] -= 1  # the cells of the last column end where the heading does, and are longer
    ends = [*starts[1:], 80]
    cells = (" ".join(r[a:b].strip() for r in rows) for a, b in zip(starts, ends, strict=True))
    return "\n".join(" ".join(cell.split()) for cell in cells)


def test_eighty_columns_show_policy_holders_and_last_use() -> None:
    holders = ("vllm-omni:12345 (session 1)", "b (session 2)")
    c = _component(
        "thinker", state="writing back", policy="alternating", group="lm", leases=2, holders=holders
    )
    other = _component("vae", policy="permanent", mutable=True, idle_s=3.1, loads=700)
    shown = _narrow(_reply(components=(c, other)))
    assert "writing back" in shown
    assert "alternating in lm permanent, mutable" in shown
    assert "2: vllm-omni:12345 (session 1), b (session 2)" in shown
    assert "in use 3.1 s ago" in shown


def test_eighty_columns_cut_no_name() -> None:
    name = "the_text_encoder_of_the_second_pipeline"
    shown = _narrow(_reply(components=(_component(name),)))
    assert name in shown.replace(" ", "").replace("\n", "")


OTHERS = (ProcessStatus(7, "python", 6 * GIB), ProcessStatus(8, "Xorg", 1 * GIB))
SESSIONS = (SessionStatus(4, "vllm-0", 1, 2), SessionStatus(5, "swapd status", 0, 0))
KV = _component("kv", policy="alternating", group="lm", mutable=True, kind="scratch")


@pytest.mark.parametrize(
    ("changes", "line", "says"),
    [
        ({}, "arena", "30 GiB of 40 GiB (75%), peak 39 GiB"),
        ({"device_bytes": 80 * GIB, "device_free_bytes": GIB}, "device", "1 GiB free of 80 GiB"),
        ({"device_bytes": 80 * GIB, "processes": OTHERS}, " ", "6 GiB: python (process 7)"),
        ({"device_bytes": 80 * GIB, "processes": OTHERS}, " ", "1 GiB: Xorg (process 8)"),
        ({"notes": ("NVML says nothing: not installed",)}, "note", "not installed"),
        ({"quarantined_bytes": GIB}, "", "1 GiB quarantined"),
        ({"private_bytes": GIB}, "host copies", "of host memory; 1 GiB more"),
        ({}, "totals", "1 load, 2 evictions, 3 hits; 4 GiB in, 0 B out"),
        (
            {"waiting": 2, "sessions": SESSIONS},
            "sessions",
            "vllm-0 (session 4): 1 lease, 2 waiting",
        ),
        ({"waiting": 2}, "waiting", "2"),
        ({"starting": ("a:7", "b:8", "c:9")}, "starting", "a:7; b:8, c:9 wait"),
        ({"starting": ("a:7",)}, "starting", "a:7"),
        ({"components": (KV,)}, "kv", "alternating in lm, scratch"),
    ],
)
def test_a_line_says_what_there_is(changes: dict[str, Any], line: str, says: str) -> None:
    shown = _shown(_reply(**changes))
    assert any(each.startswith(line) and says in each for each in shown.splitlines()), shown


def test_what_there_is_not_has_no_words() -> None:
    shown = _shown(_reply(sessions=SESSIONS, components=(KV,)))
    for word in ("quarantined", "more", "starting", "device", "mutable", "swapd status"):
        assert word not in shown
    assert _line(shown, "arena").count("█") == 3 * _line(shown, "arena").count("░")


def test_what_workers_call_themselves_cannot_reach_the_terminal() -> None:
    label = "evil\x1b[2J\n[bold]"
    c = _component("[red]x", state="leased", leases=1, holders=(f"{label} (session 1)",))
    text = _shown(_reply(components=(c,), sessions=(SessionStatus(1, label, 0, 0),)))
    assert "\x1b" not in text
    assert "[red]x" in text
    assert r"evil\x1b[2J\n[bold] (session 1)" in text


def test_nothing_registered_says_so(daemon: Running) -> None:
    text = swapd("status", "--endpoint", daemon.folder).stdout
    assert "nothing is registered" in text
    assert "0 B of 16 MiB" in text


def test_on_a_terminal(daemon: Running) -> None:
    client = daemon.client("thinker-worker", thinker=8)
    with client.acquire("thinker"):
        text = on_terminal("status", "-e", daemon.folder)
    assert "leased" in _line(text, "thinker")
    assert "1: thinker-worker (session 1)" in _line(text, "thinker")
    assert "8 MiB of 16 MiB (50%)" in text


def test_as_json(daemon: Running) -> None:
    client = daemon.client("worker", thinker=8, talker=4)
    with client.acquire("thinker"):
        reply = json.loads(swapd("status", "--json", "-e", daemon.folder).stdout)
    assert [c["name"] for c in reply["components"]] == ["thinker", "talker"]
    assert reply["components"][0]["holders"] == ["worker (session 1)"]
    assert reply["used_bytes"] == 8 << 20
    assert reply["swap_log"] == str(daemon.swap_log)


def test_a_daemon_told_relative_paths_is_found_from_anywhere(folder: Path) -> None:
    words = ("serve", "--runtime-dir", "run", "--swap-log", "log.jsonl", "--budget", "4MiB")
    process = start(*words, cwd=folder)
    assert line_of(process)
    try:
        reply = json.loads(swapd("status", "--json", "-e", folder / "run").stdout)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert reply["runtime_dir"] == str(folder / "run")
    assert reply["swap_log"] == str(folder / "log.jsonl")


@pytest.mark.parametrize("words", [("status",), ("log",), ("log", "-f")])
def test_no_daemon_is_one_clear_line(folder: Path, words: tuple[str, ...]) -> None:
    done = swapd(*words, "-e", folder, status=1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"swapd: no swapd at {folder}")
    assert "swapd serve" in line


@pytest.mark.parametrize("words", [("status",), ("log",), ("stop",), ("upgrade",)])
def test_a_device_that_no_daemon_can_have_is_no_folder_to_start_one_in(
    words: tuple[str, ...],
) -> None:
    said = swapd(*words, "-d", "nope", status=1).stderr
    assert said == "swapd: there is no device 'nope'; use --device host, cuda or cuda:0\n"


def test_last_use_swaps_hits_and_swap_in_time() -> None:
    c = _component("vae", idle_s=3.1, loads=7, wasted=5, evictions=6, hits=41, swap_in_s=0.0142)
    words = _line(_shown(_reply(components=(c,))), "vae").split()
    assert words[-8:] == ["3.1", "s", "ago", "7/6", "5", "41", "14.2", "ms"]


def test_an_output_without_unicode_shows_what_it_can(daemon: Running) -> None:
    daemon.client("worker", **{"d\u00fcnn": 4})
    command = [sys.executable, "-m", "swapd", "status", "--endpoint", str(daemon.folder)]
    env = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "d?nn" in done.stdout
    assert not done.stderr


def test_each_wait_has_the_time_of_its_grant_or_why_there_is_none() -> None:
    asked = {"session": 4, "why": "", "waited_s": 2.0, "count": 3, "names": ("text", "dit")}
    known = msgspec.structs.replace(bare(WaitStatus), **asked, seconds=0.5, unknown="")
    unknown = msgspec.structs.replace(known, seconds=None, unknown="not known: dit is held")
    at_once = msgspec.structs.replace(known, names=("vae",), count=1, seconds=0.0)
    shown = _shown(_reply(waiting=3, waits=(known, unknown, at_once)))
    assert "session 4: text + dit + ... for 2 s, in about 500 ms" in shown
    assert "session 4: text + dit + ... for 2 s, not known: dit is held" in shown
    assert "session 4: vae for 2 s, at once" in shown
