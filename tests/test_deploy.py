"""The files under deploy/ agree with the code."""

import ast
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.cli.page import parse_address
from swapd.core.registry import KEPT_MAX
from swapd.plan.deploy import WORKERS
from swapd.shared.config import Config, load
from swapd.shared.units import parse_size
from swapd.web.serving import ANSWER_S
from swapd_client.vllm import versions
from swapd_client.vllm.options import NAMES, options_of
from tests.guarantees import harness
from tests.guarantees.harness import environment
from tests.processes import PYTHONPATH
from tests.web.conftest import free_port

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_example_file_states_the_defaults() -> None:
    assert load(DEPLOY / "swapd.example.toml", {}, {}) == Config()


def test_the_example_file_names_every_setting() -> None:
    text = (DEPLOY / "swapd.example.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    for name in Config.__struct_fields__:
        assert any(line.startswith(f"{name} = ") for line in lines), name


# --- systemd -------------------------------------------------------------------------------

UNIT = DEPLOY / "swapd@.service"
#: Of `systemd-analyze security`: 10 is no protection.
EXPOSURE_MAX = 4.0
analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's systemd"
)


def unit(key: str) -> list[str]:
    """The values of `key` in the unit, in order."""
    lines = UNIT.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def analyzed(*words: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *words, str(UNIT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@analyze
def test_systemd_has_nothing_to_say_of_the_unit() -> None:
    assert analyzed("verify") == ""


@analyze
def test_the_unit_leaves_little_open() -> None:
    shown = analyzed("security", "--offline=true")
    (score,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", shown)
    assert float(score) < EXPOSURE_MAX


def test_the_unit_needs_no_file_and_finds_swapd_in_a_virtual_environment(folder: Path) -> None:
    """Its command line, run as systemd would, with nothing under /etc."""
    assert all(file.startswith("-") for file in unit("EnvironmentFile"))
    (path,) = (e.removeprefix("PATH=") for e in unit("Environment") if e.startswith("PATH="))
    (folder / "opt/swapd").mkdir(parents=True)
    (folder / "opt/swapd/bin").symlink_to(Path(sys.executable).parent)
    command = unit("ExecStart")[0].replace("%i", "host")
    for own in ("/run/", "/var/"):
        command = command.replace(f" {own}", f" {folder}{own}")
    for made in (*unit("RuntimeDirectory"), *unit("StateDirectory")):
        under = "run" if made.startswith("swapd-") else "var/lib"
        (folder / under / made.replace("%i", "host")).mkdir(parents=True, mode=0o700)
    state = folder / "var/lib" / unit("StateDirectory")[0].replace("%i", "host")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(folder / "notify"))
        notify.settimeout(60)
        env = {
            "PATH": path.replace("/opt/", f"{folder}/opt/"),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": str(int(unit("WatchdogSec")[0]) * 1_000_000),
            "SWAPD_BUDGET": "8MiB",  # for this test only: 1 GiB is the default
            "STATE_DIRECTORY": str(state),
            "PYTHONPATH": PYTHONPATH,
        }
        with subprocess.Popen(command.split(), env=env, stdout=subprocess.DEVNULL) as process:
            try:
                assert unit("Type") == ["notify"]
                assert {notify.recv(100), notify.recv(100)} == {b"READY=1", b"WATCHDOG=1"}
            finally:
                process.terminate()
        assert process.returncode == 0
        assert (state / "swap-log.jsonl").exists()


def test_the_unit_waits_and_has_room_for_what_its_daemon_needs() -> None:
    assert int(unit("TimeoutStopSec")[0]) > Config().stop_timeout
    assert unit("ExecReload") == ["/bin/kill -HUP $MAINPID"]
    held = str(2 * KEPT_MAX)  # a host copy and its manifest
    assert unit("FileDescriptorStoreMax") == [held]
    assert f"FDSTORE={held}" in unit("Environment")
    assert (unit("LimitMEMLOCK"), unit("LimitNOFILE")) == (["infinity"], ["65536"])


# --- containers ----------------------------------------------------------------------------

KUBERNETES = DEPLOY / "kubernetes"
#: The user of all containers.
USER = 1000


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """The spec of each pod in the manifests."""
    sidecar, worker = documents("sidecar.yaml")[-1], documents("worker.yaml")[-1]
    daemons = documents("daemonset.yaml")[-1]["spec"]["template"]
    return {"sidecar": sidecar["spec"], "worker": worker["spec"], "daemonset": daemons["spec"]}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def daemons() -> list[dict[str, Any]]:
    return [
        c for pod in pods().values() for c in containers(pod) if c.get("args", [""])[0] == "serve"
    ]


def image() -> dict[str, str]:
    """The environment of swapd's image."""
    return dict(re.findall(r"([A-Z_]+)=(\S+)", (DEPLOY / "Dockerfile").read_text()))


def where(container: dict[str, Any]) -> str:
    """The folder that a container's commands and clients connect to."""
    return variables(container)["SWAPD_ENDPOINT"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """The environment of a container with swapd's image; without what it takes from a Secret."""
    env = container.get("env", ())
    return {**image(), **{e["name"]: str(e["value"]) for e in env if "value" in e}}


def test_all_containers_run_as_one_user_who_is_not_root() -> None:
    assert f"useradd --uid {USER} " in (DEPLOY / "Dockerfile").read_text()
    assert f"\nUSER {USER}:{USER}\n" in (DEPLOY / "Dockerfile").read_text()
    for pod in pods().values():
        assert pod["securityContext"]["runAsUser"] == USER
        assert pod["securityContext"]["runAsNonRoot"] is True
        other = [c["name"] for c in containers(pod) if "runAsUser" in c["securityContext"]]
        assert other in ([], ["own"]), "which makes the folder theirs, and ends"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert {s["user"] for s in compose["services"].values()} == {f"{USER}:{USER}"}


def test_workers_look_where_a_daemon_serves() -> None:
    assert image()["SWAPD_RUNTIME_DIR"] == image()["SWAPD_ENDPOINT"]
    served = set()
    for daemon in daemons():
        env = variables(daemon)
        assert env["SWAPD_RUNTIME_DIR"] == env["SWAPD_ENDPOINT"]
        served.add(env["SWAPD_ENDPOINT"])
    assert len(served) == 3
    asked = {where(c) for pod in pods().values() for c in pod["containers"]}
    assert asked <= served
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert compose["worker"]["environment"]["SWAPD_ENDPOINT"] == image()["SWAPD_ENDPOINT"]


def test_daemon_and_workers_see_each_other_s_processes_and_sockets() -> None:
    for pod in pods().values():
        assert pod.get("hostPID") or pod.get("shareProcessNamespace")
        for c in containers(pod):
            assert [m["mountPath"] for m in c["volumeMounts"]] == ["/run/swapd"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in compose.values():
        assert service["pid"] == "host"
        assert service["ulimits"] == {"nofile": 65536, "memlock": -1}
        assert "run:/run/swapd" in service["volumes"]


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_probes_ask_a_port_that_the_daemon_serves_longer_than_it_takes_to_say_why() -> None:
    assert len(daemons()) == 3
    for daemon in daemons():
        (port,) = daemon["ports"]
        address = parse_address(variables(daemon)["SWAPD_HTTP"])
        assert (address.port, address.loopback) == (port["containerPort"], False)
        for kind in PROBES:
            assert daemon[kind]["httpGet"] == {"path": "/healthz", "port": port["name"]}
            assert daemon[kind]["timeoutSeconds"] > ANSWER_S
        lives = daemon["livenessProbe"]
        assert lives["periodSeconds"] * lives["failureThreshold"] >= 300
    for pod in pods().values():
        ports = [port for c in containers(pod) for port in c.get("ports", ())]
        for key in ("name", "containerPort"):
            assert len({port[key] for port in ports}) == len(ports), "of one pod, of one address"


def test_the_images_have_what_their_daemons_are_told_to_serve() -> None:
    for dockerfile in (DEPLOY / "Dockerfile", VLLM / "Dockerfile"):
        (extras,) = re.findall(r"/src(?:/swapd)?\[([a-z,]+)\]'", dockerfile.read_text())
        assert {"daemon", "cuda", "web"} <= set(extras.split(","))


def test_a_daemon_of_the_manifests_answers_its_probes_without_the_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their address and a token; on the host device."""
    manifest = daemons()[-1]
    (secret,) = [e for e in manifest["env"] if "valueFrom" in e]
    port, token = free_port(), "0123456789abcdef"
    address = parse_address(variables(manifest)["SWAPD_HTTP"])._replace(port=port)
    monkeypatch.setattr(harness, "environment", lambda: {**environment(), secret["name"]: token})
    daemon = harness.Daemon(folder / "run", folder / "log", http=address)

    def status(path: str, **headers: str) -> int:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=harness.PATIENCE_S)
        with closing(line):
            line.request("GET", path, headers={"Host": f"10.0.0.1:{port}", **headers})
            return line.getresponse().status

    try:
        for kind in PROBES:
            assert status(manifest[kind]["httpGet"]["path"]) == 200
        assert status("/metrics") == 401
        assert status("/metrics", Authorization=f"Bearer {token}") == 200
        harness.stop_process(daemon.pid)
        while (answer := status("/healthz")) == 200:  # by a recent answer
            continue
        assert answer == 503
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.close()


def test_pods_go_to_nodes_with_gpus_and_a_daemon_is_not_put_out_for_others() -> None:
    for pod in pods().values():
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
            "tolerations"
        ]
    (priority,) = [d for d in documents("daemonset.yaml") if d["kind"] == "PriorityClass"]
    assert priority["value"] > 0, "that of a pod without a class"
    assert pods()["daemonset"]["priorityClassName"] == priority["metadata"]["name"]
    assert "priorityClassName" not in pods()["worker"]


def test_a_daemon_s_container_has_memory_for_all_host_copies() -> None:
    for daemon in daemons():
        words = daemon["args"]
        load(None, {"budget": words[words.index("--budget") + 1]}, {})
        copies = parse_size(words[words.index("--host-memory") + 1])
        limit = parse_size(daemon["resources"]["limits"]["memory"])
        assert copies < limit
        assert daemon["resources"]["requests"]["memory"] == daemon["resources"]["limits"]["memory"]


def test_the_pages_name_every_file_and_how_it_was_checked() -> None:
    for folder, page in (
        (DEPLOY, "README.md"),
        (KUBERNETES, "README.md"),
        (DEPLOY / "ray", "README.md"),
    ):
        text = (folder / page).read_text()
        for path in folder.iterdir():
            assert path.name == page or path.name.startswith("__") or path.name in text, path
        assert "What was checked" in text


# --- vllm-omni -----------------------------------------------------------------------------

VLLM = DEPLOY / "vllm-omni"
OVERLAYS = sorted(VLLM.glob("swapd_*.yaml"))


def compose() -> dict[str, Any]:
    read = yaml.safe_load((VLLM / "compose.yaml").read_text())
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_says_all_that_a_stage_needs(overlay: Path) -> None:
    assert len(OVERLAYS) == 4
    read = yaml.safe_load(overlay.read_text())
    assert read["base_config"] != overlay.name  # a loader could find this file
    workers = set(WORKERS.values())
    for stage in read["stages"]:
        assert stage["devices"] == "0"
        assert {stage.get("worker_cls"), stage.get("worker_extension_cls")} & workers
        assert options_of(stage["additional_config"], overlay.name).component
        assert 0 < stage["gpu_memory_utilization"] < 1  # otherwise the base file's would count
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
#: Messages of vLLM and vllm-omni themselves.
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
    code = re.sub(r'"\s+f?"', "", code)  # strings that continue on the next line
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
