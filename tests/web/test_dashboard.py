"""Dashboard and alerts name metrics that a daemon serves, with labels that they have."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd_client import UnknownComponent
from tests.web.conftest import MIB, Served

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "swapd.rules.yml"
RULES_TESTS = DEPLOY / "prometheus" / "swapd.rules.test.yml"
DASHBOARD = DEPLOY / "grafana" / "swapd.json"
PROMTOOL = shutil.which("promtool")
#: Labels that Prometheus adds, and the label of a bucket.
ADDED = {"instance", "job", "le"}
#: And its own metric of a scrape: 1, or 0 if nothing answered.
UP = 'up{job="swapd"}'


def expressions(within: Any) -> list[str]:
    """All expressions in a document."""
    if isinstance(within, dict):
        own = [v for k, v in within.items() if k in ("expr", "definition") and isinstance(v, str)]
        return own + [each for value in within.values() for each in expressions(value)]
    if isinstance(within, list):
        return [each for value in within for each in expressions(value)]
    return []


def used() -> list[str]:
    found = expressions(json.loads(DASHBOARD.read_text()))
    assert len(found) > 20
    alerts = expressions(yaml.safe_load(RULES.read_text()))
    assert len(alerts) >= 3
    return found + alerts


def live(served: Served) -> dict[str, set[str]]:
    """All metrics that a daemon can serve, and the labels of each."""
    with served.connect() as client:
        client.register("measured", {"w": bytearray(MIB)}, mutable=True)
        client.acquire("measured").release()
        with pytest.raises(UnknownComponent):
            client.acquire("nobody's")
        names: dict[str, set[str]] = {}
        while "swapd_refusals_total" not in names:
            names = {}
            for sample in served.metrics():
                name, _, labels = sample.partition("{")
                names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return names


def test_every_metric_that_dashboard_and_alerts_name_is_served(served: Served) -> None:
    names = live(served)
    for expression in used():
        if UP in expression:
            assert "swapd_" not in expression
            continue
        asked = re.findall(r"(swapd_\w+)(?:\{([^}]*)\})?", expression)
        assert asked, expression
        for name, selector in asked:
            assert name in names, expression
            labels = set(re.findall(r"(\w+)=", selector))
            assert labels <= names[name] | ADDED, expression
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        has = set().union(*(names[name] for name, _ in asked)) | ADDED
        assert {label.strip() for each in grouped for label in each.split(",")} <= has, expression


def test_every_metric_that_is_served_is_explained(served: Served) -> None:
    page = (DEPLOY / "watching.md").read_text()
    for name in live(served):
        assert re.sub("_(bucket|sum|count)$", "", name) in page, name


def test_a_scrape_that_asks_for_a_strange_version_gets_the_metrics(served: Served) -> None:
    answer = served.ask("/metrics", Accept="application/openmetrics-text; version=new")
    assert answer.status == 200
    assert "swapd_arena_bytes" in answer.text


def test_alerts_watch_for_a_page_that_is_gone_in_the_job_that_the_pages_name() -> None:
    """What a process exports says nothing any more once that process is gone."""
    alerts = expressions(yaml.safe_load(RULES.read_text()))
    assert {f"{UP} == 0", f"absent({UP})"} <= set(alerts)
    for page in (DEPLOY / "watching.md", DEPLOY / "kubernetes" / "README.md"):
        configs = re.findall(r"^scrape_configs:\n(?:[ #].*\n)+", page.read_text(), re.MULTILINE)
        jobs = [yaml.safe_load(text)["scrape_configs"][0]["job_name"] for text in configs]
        assert jobs == ["swapd"], page


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(("what", "file"), [("check", RULES), ("test", RULES_TESTS)])
def test_promtool_finds_nothing_wrong_with_the_alerts(what: str, file: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, what, "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
