"""The page and its other paths show the daemon's state, and load nothing from elsewhere."""

import base64
import hashlib
import os
import re
import signal
from pathlib import Path
from typing import get_args

import pytest

from swapd.cli.conclusions import Kind, StatusReport
from swapd.shared.protocol import WASTED_LAST
from swapd.web.serving import PAST_S
from tests.contents import bytes_of
from tests.threads import started
from tests.web.conftest import MIB, Served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "swapd" / "web" / "page.html").read_text()
KINDS = get_args(Kind)


def test_the_page_is_one_file_that_fetches_nothing_and_runs_nothing_else(served: Served) -> None:
    answer = served.ask("/")
    assert (answer.status, answer.text) == (200, PAGE)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not re.search(r'(src|href)="(?!data:)', PAGE)


def test_words_of_others_never_become_html() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)


def test_status_is_the_document_that_the_command_prints(served: Served) -> None:
    told = served.ask("/status").json
    assert told.keys() == {"op", *StatusReport.__struct_fields__}
    assert told["runtime_dir"] == str(served.daemon.folder)


def test_the_counts_are_the_daemons(served: Served) -> None:
    with served.connect() as client:
        for name in ("counted-a", "counted-b"):
            client.register(name, {"w": bytes_of(name, 10 * MIB)})
        for name in ("counted-a", "counted-b", "counted-b", "counted-a", "counted-a"):
            client.acquire(name).release()
        wanted = {c.name: c for c in served.daemon.status().components}
        for name in ("counted-a", "counted-b"):
            c = wanted[name]
            served.until(name, loads=c.loads, evictions=c.evictions, hits=c.hits, leases=0)
            found = served.metrics()
            assert found[f'swapd_loads_total{{component="{name}"}}'] == c.loads
            assert found[f'swapd_evictions_total{{component="{name}"}}'] == c.evictions
            assert found[f'swapd_hits_total{{component="{name}"}}'] == c.hits
            resident = found[f'swapd_component_resident_bytes{{component="{name}"}}']
            assert (resident > 0) == (c.state == "idle")
    assert found["swapd_records_missed_total"] == 0
    assert found['swapd_copy_seconds_count{direction="in"}'] == _sum(served, "swapd_loads_total")
    assert found['swapd_moved_bytes_total{direction="in"}'] >= 30 * MIB
    assert found["swapd_wait_seconds_count"] >= 3


def test_a_component_that_is_gone_is_gone_from_page_and_metrics(served: Served) -> None:
    with served.connect() as client:
        client.register("short", {"w": bytearray(MIB)})
        client.acquire("short").release()
        served.until("short", state="idle")
        loads = _sum(served, "swapd_loads_total")
        client.unregister("short")
        while served.component("short") is not None or "short" in served.records()["marks"]:
            continue
        assert not any("short" in name for name in served.metrics())
        assert _sum(served, "swapd_loads_total") == loads


def test_a_waiting_session_is_listed_with_the_holders_it_waits_for(served: Served) -> None:
    with served.connect("holds") as first, served.connect("waits") as second:
        for client, name in ((first, "held"), (second, "wanted")):
            client.register(name, {"w": bytes_of(name, 10 * MIB)})
        lease = first.acquire("held")
        waiting = started(lambda: second.acquire("wanted").release())
        while not (told := served.ask("/status").json)["waits"]:
            continue
        (wait,) = told["waits"]
        labels = {session["session"]: session["label"] for session in told["sessions"]}
        assert (wait["names"], labels[wait["session"]]) == (["wanted"], "waits")
        assert "held (10 MiB) by holds" in wait["why"]
        assert served.metrics()["swapd_queue_length"] == 1
        assert served.metrics()["swapd_longest_wait_seconds"] > 0
        lease.release()
        waiting.join()
        while served.ask("/status").json["waits"]:
            continue


def test_records_are_given_once_and_marks_since_a_time(served: Served) -> None:
    with served.connect() as client:
        client.register("told", {"w": bytearray(MIB)})
        client.acquire("told").release()
        served.until("told", state="idle")
        while not any(line["subject"] == "told" for line in served.records()["lines"]):
            served.ask("/healthz")
        last = served.records()["lines"][-1]["seq"]
        assert all(line["seq"] > last for line in served.records(after=last)["lines"])
        marks = served.records()["marks"]["told"]
        assert marks[-1][1:] == ["r", 1.0]
        assert "told" not in served.records(since=marks[-1][0])["marks"]


def test_the_chart_its_heading_and_all_pages_name_the_past_that_is_kept() -> None:
    assert re.findall(r"PAST_S = (\d+)", PAGE) == [f"{PAST_S:.0f}"]
    tops = ("*.md", "docs/**/*.md", "deploy/**/*.md", "swapd/**/*.md")
    texts = [PAGE, *(path.read_text() for top in tops for path in ROOT.glob(top))]
    said = re.compile(r"residency(?:,| over) the\s+last\s+((?:\w+\s+)?minutes?)")
    found = [each for text in texts for each in said.findall(text)]
    assert len(found) >= 4, "the heading, and the pages about it"
    assert set(found) == {{300.0: "five minutes"}[PAST_S]}


@pytest.mark.parametrize("query", ["after=x", "after=" + "9" * 400, "a=b&" * 500, "after=1.2.3"])
def test_a_query_of_any_kind_is_answered(served: Served, query: str) -> None:
    assert served.ask(f"/records?{query}").status == 200


def _sum(served: Served, name: str) -> float:
    return sum(value for key, value in served.metrics().items() if key.startswith(name))


@pytest.mark.parametrize(
    "path", ["/nothing", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/status/x"]
)
def test_paths_outside_are_refused(served: Served, path: str) -> None:
    assert served.ask(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    assert served.ask("/", method).status == 405


def test_a_page_of_another_site_is_refused(served: Served) -> None:
    assert served.ask("/status", host="evil.example").status == 421
    assert served.ask("/status", host=f"evil.example:{served.port}").status == 421
    assert served.ask("/status", sec_fetch_site="cross-site", sec_fetch_mode="cors").status == 403
    assert served.ask("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200
    assert served.ask("/healthz", host=f"localhost:{served.port}").status == 200


def test_a_daemon_that_does_not_answer_is_not_healthy() -> None:
    one = Served()
    try:
        assert one.ask("/healthz").status == 200
        os.kill(one.daemon.pid, signal.SIGSTOP)
        while one.ask("/healthz").status == 200:  # by a recent answer
            continue
        assert one.ask("/").status == 200
        assert one.metrics()["swapd_status_age_seconds"] > 0
    finally:
        os.kill(one.daemon.pid, signal.SIGCONT)
        one.close()


def test_a_daemon_that_thrashes_says_so_to_page_and_prometheus() -> None:
    one = Served()
    try:
        with one.connect() as client:
            for name in ("encoder", "decoder"):
                client.register(name, {"w": bytes_of(name, 10 * MIB)})
            assert one.ask("/status").json["conclusions"] == []
            assert one.metrics()['swapd_conclusion{kind="thrashing"}'] == 0
            for name in ("encoder", "decoder") * (WASTED_LAST // 2 + 1):
                client.acquire(name).release()
            while not (found := one.ask("/status").json["conclusions"]):
                continue
            (said,) = found
            assert "encoder need 20 MiB in turn, and 16 MiB are there" in said["text"]
            samples = one.metrics()
            told = {kind: samples[f'swapd_conclusion{{kind="{kind}"}}'] for kind in KINDS}
            assert told == {kind: kind == said["kind"] for kind in KINDS}
            assert samples['swapd_wasted_loads_total{component="encoder"}'] == WASTED_LAST // 2
    finally:
        one.close()
