"""The files under deploy/ say what the code does."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.plan.deploy import WORKERS
from swapd.shared.config import Config, load
from swapd_client.vllm import versions
from swapd_client.vllm.options import NAMES, options_of

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_example_file_states_the_defaults() -> None:
    assert load(DEPLOY / "swapd.example.toml", {}, {}) == Config()


def test_the_example_file_names_every_setting() -> None:
    text = (DEPLOY / "swapd.example.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    for name in Config.__struct_fields__:
        assert any(line.startswith(f"{name} = ") for line in lines), name


def test_the_unit_waits_for_the_readiness_message() -> None:
    assert "Type=notify" in (DEPLOY / "swapd@.service").read_text()


# --- vllm-omni -----------------------------------------------------------------------------

VLLM = DEPLOY / "vllm-omni"
OVERLAYS = sorted(VLLM.glob("swapd_*.yaml"))


def compose() -> dict[str, Any]:
    read = yaml.safe_load((VLLM / "compose.yaml").read_text())
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_says_all_that_a_stage_needs(overlay: Path) -> None:
    assert len(OVERLAYS) == 3
    read = yaml.safe_load(overlay.read_text())
    assert read["base_config"] != overlay.name  # a loader that looks beside it would find itself
    assert read.get("async_chunk") is False or len(read["stages"]) == 1
    workers = set(WORKERS.values())
    for stage in read["stages"]:
        assert stage["devices"] == "0"
        assert {stage.get("worker_cls"), stage.get("worker_extension_cls")} & workers
        assert options_of(stage["additional_config"], overlay.name).component
        assert 0 < stage["gpu_memory_utilization"] < 1  # else the base file's would be counted
    assert sum(s["gpu_memory_utilization"] for s in read["stages"]) < 0.5


def test_workers_in_the_overlays_are_there() -> None:
    for kind, dotted in WORKERS.items():
        module, _, name = dotted.rpartition(".")
        path = DEPLOY.parent / "client" / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        assert name in [n.name for n in tree.body if isinstance(n, ast.ClassDef)], kind


def test_daemon_and_stages_share_user_folder_gpu_and_processes() -> None:
    swapd, omni = (compose()["services"][name] for name in ("swapd", "vllm-omni"))
    shared = ("image", "build", "user", "volumes", "ulimits", "pid", "deploy")
    assert [swapd[key] for key in shared] == [omni[key] for key in shared]
    assert swapd["pid"] == "host"
    assert swapd["ulimits"] == {"nofile": 65536, "memlock": -1}
    (gpu,) = swapd["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    named = {volume.partition(":")[0] for volume in swapd["volumes"]}
    assert named == set(compose()["volumes"])


def test_stages_start_when_the_daemon_listens_where_they_look() -> None:
    services = compose()["services"]
    assert services["vllm-omni"]["depends_on"] == {"swapd": {"condition": "service_healthy"}}
    words = services["swapd"]["command"].split()
    folder = words[words.index("--runtime-dir") + 1]
    assert f"ENV SWAPD_ENDPOINT={folder}\n" in (VLLM / "Dockerfile").read_text()
    assert services["swapd"]["healthcheck"]["test"] == ["CMD", "swapd", "status"]
    mounts = [volume.split(":")[1] for volume in services["swapd"]["volumes"]]
    assert any(folder.startswith(f"{mount}/") for mount in mounts)


def test_compose_knows_every_key() -> None:
    known = {
        *("image", "build", "user", "volumes", "pid", "ipc", "ulimits", "deploy", "command"),
        *("healthcheck", "stop_grace_period", "restart", "depends_on", "ports"),
    }
    for service in compose()["services"].values():
        assert set(service) <= known
    assert {key for key in compose() if not key.startswith("x-")} == {"name", "services", "volumes"}


def test_the_image_has_the_versions_that_are_supported() -> None:
    (omni, *_) = versions.SUPPORTED["vllm_omni"]
    text = (VLLM / "Dockerfile").read_text()
    assert f"vllm=={omni}." in text
    assert f"vllm-omni=={omni}." in text


def test_the_image_is_built_of_what_is_there() -> None:
    build = compose()["services"]["swapd"]["build"]
    root = (VLLM / build["context"]).resolve()
    assert root == DEPLOY.parent
    assert (root / build["dockerfile"]).is_file()
    chosen = compose()["services"]["vllm-omni"]["command"]
    (default,) = re.findall(r"OVERLAY:-(\S+?)}", chosen)
    assert (VLLM / default).is_file()


# --- the page ------------------------------------------------------------------------------

PAGE = (VLLM / "README.md").read_text()
#: What vLLM and vllm-omni say themselves.
THEIRS = (
    "no structured config owner",
    "Free memory on device",
    "No available memory",
    "To serve at least one request",
)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under `heading`, without its first two lines."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_errors_are_quoted_as_the_code_has_them() -> None:
    client = DEPLOY.parent / "client" / "swapd_client"
    code = "".join(path.read_text() for path in client.rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)  # strings that go on in the next line
    cells = [cell for cell, _ in rows("If it does not start") if cell.startswith("`")]
    quoted = [text for cell in cells for text in re.findall("`(.*?)`", cell)]
    quoted = [text for text in quoted if not text.startswith(THEIRS)]
    assert len(quoted) > 8
    pieces = [
        piece.strip()
        for text in quoted
        for piece in re.split(r"\.\.\.|: |; |'?thinker'?|(?:vllm )?[\d.]+x?| and ", text)
    ]
    assert [piece for piece in pieces if len(piece) > 8 and piece not in code] == []


def test_every_option_is_explained() -> None:
    for name in NAMES:
        assert f"`{name}" in PAGE or fnmatch(name, "cpu_offload_*"), name
    assert "`cpu_offload_*`" in PAGE


def test_supported_versions_are_said() -> None:
    (said,) = re.findall(r"\*\*Versions\.\*\* (.*?\.) \*\*", PAGE, re.DOTALL)
    for minors in versions.SUPPORTED.values():
        assert set(minors) <= set(re.findall(r"\d+\.\d+", said))
