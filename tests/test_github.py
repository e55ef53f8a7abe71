"""The files for a host of git repositories: its workflow runs what CI runs, and has no secret."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.processes import ROOT

GITHUB = ROOT / ".github"
WORKFLOW = GITHUB / "workflows" / "ci.yml"
TEXT = WORKFLOW.read_text()
ACTIONLINT = shutil.which("actionlint")


def workflow() -> dict[Any, Any]:
    read = yaml.safe_load(TEXT)
    assert isinstance(read, dict)
    return read


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_pushes_and_proposals_run_what_ci_runs_and_a_tag_builds_after_it() -> None:
    when, jobs = workflow()[True], workflow()["jobs"]  # YAML takes the word `on` for true
    assert set(when) == {"push", "pull_request"}
    assert when["push"]["tags"] == ["v*"]
    assert commands(jobs["test"]).endswith(" .ci/run\n")
    assert "if" not in jobs["test"]
    built = {name: job for name, job in jobs.items() if name != "test"}
    assert {job["if"] for job in built.values()} == {"startsWith(github.ref, 'refs/tags/v')"}
    assert {job["needs"] for job in built.values()} == {"test"}
    assert "python -m build" in commands(built["packages"])
    assert "docker build -f deploy/Dockerfile " in commands(built["image"])


def test_the_workflow_has_no_secret_and_may_change_nothing() -> None:
    assert workflow()["permissions"] == {"contents": "read"}
    assert "secrets." not in TEXT
    assert not re.search(r"https?://|docker (push|login)", TEXT)
    for job in workflow()["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize(("tag", "status"), [("v{}", 0), ("v{}1", 1), ("{}", 1)])
def test_a_tag_of_another_version_builds_no_packages(tag: str, status: int) -> None:
    from swapd import __version__

    (check,) = [
        line for line in commands(workflow()["jobs"]["packages"]).splitlines() if "test " in line
    ]
    done = subprocess.run(
        ["sh", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag.format(__version__)}, check=False
    )
    assert done.returncode == status


def test_a_report_of_a_bug_asks_for_the_machine_and_the_swap_log() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert set(front) == {"name", "about"}
    for asked in ("$ swapd doctor --json\n", "$ swapd log --json -n 200\n", "SECURITY.md"):
        assert asked in text


@pytest.mark.skipif(ACTIONLINT is None, reason="actionlint is not installed")
def test_actionlint_has_nothing_to_say_of_the_workflow() -> None:
    assert ACTIONLINT is not None
    done = subprocess.run([ACTIONLINT, WORKFLOW], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
