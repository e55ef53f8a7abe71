"""The files under deploy/ say what the code does."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.config import Config, load
from swapd.plan.deploy import WORKERS
from swapd_client.vllm import versions
from swapd_client.vllm.options import options_of

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
    text = (VLLM / "Dockerfile").read_text()
    for package, version in versions.SUPPORTED.items():
        assert f"{package.replace('_', '-')}=={version}" in text


def test_the_image_is_built_of_what_is_there() -> None:
    build = compose()["services"]["swapd"]["build"]
    root = (VLLM / build["context"]).resolve()
    assert root == DEPLOY.parent
    assert (root / build["dockerfile"]).is_file()
    chosen = compose()["services"]["vllm-omni"]["command"]
    (default,) = re.findall(r"OVERLAY:-(\S+?)}", chosen)
    assert (VLLM / default).is_file()
