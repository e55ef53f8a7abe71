"""What follows from a status, in words with the setting to change; and where it is said."""

import json
import re
import subprocess
import sys
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from swapd.cli.conclusions import StatusReport, conclusions, quantile, report
from swapd.cli.live import screen
from swapd.cli.status import page
from swapd.shared.protocol import (
    WASTED_LAST,
    WASTED_S,
    ComponentStatus,
    Histogram,
    Status,
    WastedLoads,
)
from tests.samples import bare

from .conftest import MIB, Running, environment, swapd

GIB = 1 << 30
#: In turn all the time; and with pauses, so that copies take little of it.
ALWAYS = WastedLoads(ago_s=0.1, took_s=4.0, copying_s=3.0, hits=0)
SELDOM = WastedLoads(ago_s=5.0, took_s=40.0, copying_s=2.0, hits=0)


def component(name: str, mib: int, **changes: Any) -> ComponentStatus:
    usual: dict[str, Any] = {"policy": "lru", "group": None, "state": "idle", "leases": 0}
    given = {"nbytes": mib * MIB, "idle_s": 1.0, "wasted": 4, "holders": (), **usual, **changes}
    found: ComponentStatus = bare(ComponentStatus)
    return msgspec.structs.replace(found, name=name, **given)


def told(*components: ComponentStatus, mib: int = 64, **changes: Any) -> Status:
    """A status of a daemon whose budget is `mib`."""
    sizes = {"chunk_bytes": 2 * MIB, "budget_bytes": mib * MIB, "quarantined_bytes": 0}
    given = {"wasted": ALWAYS, "components": components, "sessions": (), **sizes, **changes}
    found: Status = bare(Status)
    return msgspec.structs.replace(found, **given)


ENCODER, DECODER = component("encoder", 60), component("decoder", 59)
PAIR = (ENCODER, DECODER)
SCRATCH = component("kv", 16, kind="scratch", policy="permanent", wasted=0)
TURNS = [component(n, 20, policy="alternating", group="lm") for n in ("one", "two")]
PARTS = [component(f"dit/{n}", 40, part_of="dit", policy="sequential") for n in range(9)]
KEPT = component("dit/kept", 10, part_of="dit")
LONG = [component(f"{n:0200d}", 2) for n in range(4096)]
STAYS = component("stays", 40, policy="permanent", wasted=0, idle_s=None)

NEEDS = "encoder and decoder need 120 MiB in turn, and 64 MiB are there: "
RAISE = "a --budget of 120MiB ($SWAPD_BUDGET) would end it"
OFTEN = "each use is a swap, and copies take 75% of the time; "

CASES = {
    "a pair that does not fit": (told(*PAIR), "thrashing", NEEDS + OFTEN + RAISE),
    "its copies take little time": (
        told(*PAIR, wasted=SELDOM),
        "swapping",
        f"{NEEDS}each use is a swap, and copies take 5% of the time; {RAISE}",
    ),
    "many uses between two long loads": (
        told(*PAIR, wasted=msgspec.structs.replace(ALWAYS, hits=900)),
        "thrashing",
        f"{NEEDS}8 swaps with 900 hits, and copies take 75% of the time; {RAISE}",
    ),
    "an idle one beside it does not count": (
        told(*PAIR, component("vae", 64, idle_s=3600.0)),
        "thrashing",
        NEEDS + OFTEN + RAISE,
    ),
    "what stays counts": (
        told(component("a", 40), component("b", 30), SCRATCH),
        "thrashing",
        "need 86 MiB in turn",
    ),
    "memory in quarantine does not": (
        told(*PAIR, quarantined_bytes=4 * MIB),
        "thrashing",
        "need 120 MiB in turn, and 60 MiB are there",
    ),
    "a group whose members both fit": (
        told(*TURNS),
        "thrashing",
        f"one and two exclude each other, in the alternating group lm: {OFTEN}"
        'policy="lru" in place of "alternating" would end it',
    ),
    "a group whose members do not fit": (
        told(*TURNS, mib=32),
        "thrashing",
        f'"lru" in place of "alternating" and {RAISE.replace("120", "40")}',
    ),
    "what fits, and leaves for workspaces": (
        told(component("a", 20), component("b", 10)),
        "thrashing",
        f"a and b make room, though all fits: 30 MiB of 64 MiB: {OFTEN}"
        "for workspaces, perhaps: swapd log a says for what",
    ),
    "parts that pass by have one place": (
        told(*PARTS, KEPT, ENCODER),
        "thrashing",
        "dit and encoder need 110 MiB in turn",
    ),
    "more than the device has": (
        told(*PAIR, device_bytes=80 * MIB, device_free_bytes=16 * MIB),
        "thrashing",
        f"{RAISE}, and the device has 80 MiB for it: keep less of encoder there",
    ),
    "a name without end among thousands": (
        told(*LONG),
        "thrashing",
        f"{'0' * 37}..., {'0' * 37}..., {'0' * 37}... and 4093 more need 8 GiB in turn",
    ),
    "one larger than what others leave": (
        told(STAYS, component("large", 30), wasted=None),
        "never_fits",
        "large needs 30 MiB at once, and what stays (stays) leaves 24 MiB: acquires are refused; "
        'fewer of policy="permanent", or a --budget of 70MiB ($SWAPD_BUDGET), would end it',
    ),
    "one larger than what pins leave": (
        told(msgspec.structs.replace(STAYS, pinned=True), component("large", 30), wasted=None),
        "never_fits",
        "; swapd unpin stays, or a --budget of 70MiB",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_situation_has_a_conclusion_with_the_setting_to_change(case: str) -> None:
    status, kind, says = CASES[case]
    (found,) = conclusions(status)
    assert found.kind == kind
    assert says in found.text
    assert found.text.isascii()
    assert len(found.text) < 500


QUIET = {
    "ample": told(*PAIR, mib=128, wasted=None),
    "a few first loads": told(*PAIR, wasted=None),
    "idle": told(*PAIR, wasted=msgspec.structs.replace(ALWAYS, ago_s=WASTED_S + 1)),
    "rare": told(*PAIR, wasted=msgspec.structs.replace(SELDOM, took_s=301.0)),
    "most uses find it there": told(*PAIR, wasted=msgspec.structs.replace(SELDOM, hits=8)),
    "it fits beside what stays": told(STAYS, component("small", 24), wasted=None),
    "nothing is there": told(wasted=None),
    "all of it is gone": told(),
    "its next process has swapped nothing": told(component("encoder", 60, wasted=0)),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_well_has_no_conclusion(case: str) -> None:
    assert conclusions(QUIET[case]) == ()


@pytest.mark.parametrize(
    ("counts", "p50_s", "p95_s"),
    [
        ([0, 0, 0], None, None),
        ([10, 0, 0], 0.5, 0.95),
        ([5, 5, 0], 1.0, 2.8),
        ([0, 0, 3], 3.0, 3.0),
        ([94, 0, 6], 50 / 94, 3.0),
    ],
)
def test_a_quantile_is_within_its_class(
    counts: list[int], p50_s: float | None, p95_s: float | None
) -> None:
    times = Histogram((1.0, 3.0), counts)
    assert [quantile(times, share) for share in (0.5, 0.95)] == pytest.approx([p50_s, p95_s])


def words(status: Status, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(page(status, wide=width > 80))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_status_says_it_whole_at_any_width(width: int) -> None:
    lines = words(told(*PAIR), width)
    assert max(map(len, lines)) <= width
    (first,) = [at for at, line in enumerate(lines) if line.startswith("thrashing")]
    said = " ".join(line.removeprefix("thrashing").strip() for line in lines[first:])
    assert "".join(said.split()) == "".join((NEEDS + OFTEN + RAISE).split())


@pytest.mark.parametrize("height", [1, 6, 13, 14, 24])
def test_top_says_it_where_it_has_lines_for_it(height: int) -> None:
    view = screen.Snapshot(report(told(*PAIR)), (), 0.0)
    lines = [line.plain for line in screen.lines(view, screen.Choice(), 80, height, 0.0)]
    assert len(lines) == height
    assert (RAISE in " ".join(map(str.strip, lines))) == (height >= 14)
    assert any(line.startswith("encoder") for line in lines) == (height > 3)


def test_top_says_the_setting_behind_names_without_end() -> None:
    longest = told(*LONG, device_bytes=80 * MIB, device_free_bytes=16 * MIB)
    view = screen.Snapshot(report(longest), (), 0.0)
    lines = [line.plain for line in screen.lines(view, screen.Choice(), 80, 24, 0.0)]
    said = " ".join(map(str.strip, lines))
    assert "a --budget of 8192MiB ($SWAPD_BUDGET) would end it" in said
    assert "then swapd resize)" in said
    assert any(line.startswith("0000") for line in lines)


# --- a real daemon -----------------------------------------------------------------------


def take_turns(daemon: Running) -> None:
    """Two components that do not fit together, in turn, until there were enough swaps."""
    client = daemon.client("worker", encoder=10, decoder=10)
    for _ in range(WASTED_LAST // 2 + 1):
        for name in ("encoder", "decoder"):
            client.acquire(name).release()


def test_a_daemon_that_thrashes_says_so_and_names_the_budget(daemon: Running) -> None:
    take_turns(daemon)
    shown = swapd("status", "-e", daemon.folder).stdout
    assert re.search(
        r"^(thrashing|swapping)  +decoder and encoder need 20 MiB in turn", shown, re.M
    )
    assert "each use is a swap" in shown
    assert "a --budget of 20MiB ($SWAPD_BUDGET) would end it" in shown
    assert re.search(r"^times  +acquires wait p50 .*s, p95 .*s; loads at .*B/s", shown, re.M)
    assert re.search(r"^component .* waits p50, p95$", shown, re.M)
    assert re.search(r"^encoder .* [\d.]+ m?s, [\d.]+ m?s$", shown, re.M)
    found = json.loads(swapd("status", "-e", daemon.folder, "--json").stdout)
    (one,) = found["conclusions"]
    assert one["text"] in shown
    assert found.keys() == {"op", *StatusReport.__struct_fields__}
    assert 0 < found["wait_p50_s"] <= found["wait_p95_s"]
    assert found["load_bytes_per_s"] > 0
    assert [c["wasted"] for c in found["components"]] == [4, 4]
    assert found["counts"]["of"]["encoder"]["wasted"] == 4
    assert found["waits_s"].keys() == {"encoder", "decoder"}
    assert all(0 < each["p50_s"] <= each["p95_s"] for each in found["waits_s"].values())


def test_an_output_in_ascii_loses_no_word_of_it(daemon: Running) -> None:
    take_turns(daemon)
    command = [sys.executable, "-m", "swapd", "status", "--endpoint", str(daemon.folder)]
    env = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "need 20 MiB in turn, and 16 MiB are there: each use is a swap" in done.stdout


def test_a_daemon_with_room_for_both_says_nothing(daemon: Running) -> None:
    client = daemon.client("worker", encoder=8, decoder=8)
    for name in ("encoder", "decoder") * (WASTED_LAST + 1):
        client.acquire(name).release()
    found = json.loads(swapd("status", "-e", daemon.folder, "--json").stdout)
    assert (found["conclusions"], found["wasted"]) == ([], None)


def test_what_workers_call_themselves_reaches_no_terminal() -> None:
    shown = "\n".join(words(told(component("[red]\x1b[2Jx", 60), DECODER), 120))
    assert "\x1b" not in shown
    assert "[red]" in shown
