"""`swapd run FILE.toml` plans its vLLM servers together, or refuses them with the sum.

A stub of the CUDA driver has the GPUs; the servers only print how they were started.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.run.commands import option
from tests import fakecuda
from tests.plan.omni import write
from tests.plan.test_sizes import save
from tests.plan.test_streams import OLMO, SHAPES, planned, stage

from .conftest import swapd

MIB, GIB = 1 << 20, 1 << 30
OMNI = "swapd_client.vllm.omni.GenerationWorker"
SHOWN = "CUDA_VISIBLE_DEVICES"
GPU = '[daemon]\ndevice = "cuda:0"\n'
#: Contexts of two stages and a daemon, the reserve, and the workspaces of two stages, in bytes.
BESIDE = 3 * 512 * MIB + 2 * GIB + 2 * 2 * GIB


@pytest.fixture(autouse=True)
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the folder of daemons; each server prints its daemon and arguments."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("vllm", "vllm-omni"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$SWAPD_ENDPOINT" "$@"\n')
        (tmp_path / name).chmod(0o700)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakecuda.Fake]:
    """A machine that shows one GPU of 12 GiB. Daemons of other tests are on other GPUs."""
    with fakecuda.shown(monkeypatch, devices=16, total=12 * GIB) as fake:
        monkeypatch.setenv(SHOWN, "7")
        yield fake


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str, int], Path]:
    """Makes a folder with a sparse file of so many bytes of weights."""

    def made(name: str, nbytes: int) -> Path:
        save(tmp_path / name / "model.safetensors", w=nbytes)
        return tmp_path / name

    return made


@pytest.fixture
def omni(tmp_path: Path, model: Callable[[str, int], Path]) -> Callable[..., str]:
    """Writes a stage with a vLLM-Omni server that has one stage, on GPU 0, with this component."""

    def made(name: str, nbytes: int, component: str = "", **stage: object) -> str:
        entry = {"stage_id": 0, "devices": "0", "worker_cls": OMNI}
        entry |= {"enforce_eager": True, **stage}
        entry["additional_config"] = {"swapd": {"component": component or name}}
        (tmp_path / f"{name}-deploy.yaml").write_text(json.dumps({"stages": [entry]}))
        model(name, nbytes)
        words = ["./vllm-omni", "serve", name, "--omni", f"--deploy-config={name}-deploy.yaml"]
        return f"[stages.{name}]\ncommand = {json.dumps(words)}\n"

    return made


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def made(*parts: str) -> Path:
        (path := tmp_path / "run.toml").write_text("\n".join(parts))
        return path

    return made


def overlay_in(line: str) -> dict[str, Any]:
    """The overlay that a server was started with."""
    found: dict[str, Any] = yaml.safe_load(
        Path(line.split("--deploy-config ")[1].split()[0]).read_text()
    )
    return found


def test_a_stage_of_vllm_omni_is_planned_and_gets_its_overlay_and_a_daemon_for_it(
    card: fakecuda.Fake,
    omni: Callable[..., str],
    file: Callable[..., Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHOWN, "8")
    done = swapd("run", file(omni("voice", 100 * MIB)))
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"voice | {folder}/swapd/cuda8 serve voice --deploy-config ")
    assert line.endswith("/voice.yaml --omni")
    (stage,) = overlay_in(line)["stages"]
    assert stage["worker_cls"] == OMNI
    assert stage["gpu_memory_utilization"] == 0.166, "2 GiB of 12: the workspace alone"
    assert f"swapd on cuda:0 at {folder}/swapd/cuda8 (process " in done.stderr
    assert "), 100 MiB\n" in done.stderr, "chunks of 2 MiB, as its daemon takes them"
    assert card.held_bytes(8) == 0


def test_stages_of_vllm_omni_that_share_a_gpu_share_the_budget_of_one_plan(
    card: fakecuda.Fake, omni: Callable[..., str], file: Callable[..., Path]
) -> None:
    both = omni("voice", 3 * GIB), omni("face", 4 * GIB)
    daemon, *rest = swapd("run", "-n", file(*both)).stdout.splitlines()
    budget = 12 * GIB - BESIDE
    assert budget < 7 * GIB, "they take turns"
    assert daemon.startswith(f"swapd serve --device cuda:0 --budget {budget} ")
    assert daemon.endswith("# 4.5 GiB: the budget in the plan")
    assert sum(line.endswith("/voice.yaml") or line.endswith("/face.yaml") for line in rest) == 2
    assert [line.partition("#")[2] for line in rest if "vllm-omni" in line] == [" voice", " face"]


def test_what_does_not_fit_beside_the_others_is_refused_with_the_sum(
    card: fakecuda.Fake, omni: Callable[..., str], file: Callable[..., Path], tmp_path: Path
) -> None:
    both = omni("voice", 3 * GIB), omni("face", 5 * GIB)
    said = swapd("run", file(*both), status=1).stderr
    assert "GPU 0 cannot hold these: 12 GiB - 1.5 GiB CUDA contexts of 3 processes" in said
    assert "workspace (voice 2 GiB, face 2 GiB) leaves 4.5 GiB for weights" in said
    assert "face, the largest that takes turns (5 GiB) = 5 GiB must fit" in said
    larger = swapd("run", "-n", "--device-memory", "24GiB", file(*both)).stdout
    assert larger.startswith(f"swapd serve --device cuda:0 --budget {8 * GIB} ")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("5GiB", "GPU 0 cannot hold a budget of 5 GiB: 12 GiB - 1.5 GiB CUDA contexts of"),
        ("3GiB", "- 1.5 GiB outside of the budget of 3 GiB - 4 GiB workspace"),
    ],
)
def test_a_budget_that_is_said_is_held_against_the_plan(
    card: fakecuda.Fake,
    omni: Callable[..., str],
    file: Callable[..., Path],
    budget: str,
    said: str,
) -> None:
    stages = omni("voice", 3 * GIB), omni("face", 4 * GIB)
    path = file(GPU, f'budget = "{budget}"', *stages)
    assert said in swapd("run", path, status=1).stderr
    path.write_text(path.read_text().replace(budget, "4.25GiB"))
    daemon, *_ = swapd("run", "-n", path).stdout.splitlines()
    assert daemon.startswith(f"swapd serve --device cuda:0 --budget {17 * GIB // 4} ")
    assert daemon.endswith(f"# 4.25 GiB: budget of {path}")


def test_of_two_flags_for_offloading_the_one_that_vllm_omni_drops_is_named(
    card: fakecuda.Fake, omni: Callable[..., str], file: Callable[..., Path]
) -> None:
    both = '"--enable-layerwise-offload", "--enable-cpu-offload"]'
    path = file(omni("voice", MIB).replace('"]', f'", {both}'))
    said = swapd("run", "-n", path).stderr
    assert "--enable-layerwise-offload is set too, so --enable-cpu-offload is ignored" in said
    path.write_text(path.read_text().replace(f", {both}", "]"))
    assert "is ignored" not in swapd("run", "-n", path).stderr


def test_two_components_of_one_name_are_refused(
    card: fakecuda.Fake, omni: Callable[..., str], file: Callable[..., Path]
) -> None:
    said = swapd("run", file(omni("a", MIB, "one"), omni("b", MIB, "one")), status=1).stderr
    assert "stages.a and stages.b would both have a component called one on cuda:0" in said
    assert "additional_config: {swapd: {component: NAME}}" in said


@pytest.mark.parametrize(
    ("others", "both"),
    [
        ("a/talker b/talker", "stages.s0 and stages.s1"),
        ("a/talker", "stages.voice and stages.s0"),
    ],
)
def test_a_model_named_like_another_component_is_refused_before_anything_starts(
    omni: Callable[..., str],
    model: Callable[[str, int], Path],
    file: Callable[..., Path],
    tmp_path: Path,
    others: str,
    both: str,
) -> None:
    """Its daemon would refuse it as soon as it has loaded, and end the run."""
    names = others.split()
    stages = [
        f'[stages.s{n}]\ncommand = "./vllm serve {model(name, MIB).relative_to(tmp_path)}"\n'
        for n, name in enumerate(names)
    ]
    voice = omni("voice", MIB, "talker") if len(names) == 1 else ""
    path = file('[daemon]\ndevice = "host"\nbudget = "16MiB"\n', voice, *stages)
    done = swapd("run", path, status=1)
    assert f"{both} would both have a component called talker on host" in done.stderr
    assert """--additional-config '{"swapd": {"component": "NAME"}}'""" in done.stderr
    assert done.stdout == ""
    named = """ --additional-config '{\\"swapd\\": {\\"component\\": \\"text\\"}}'"""
    path.write_text(path.read_text().replace('talker"\n', f'talker{named}"\n', 1))
    assert swapd("run", path).stdout.count(" serve ") == 2


def test_models_of_one_name_may_follow_each_other(
    model: Callable[[str, int], Path], file: Callable[..., Path]
) -> None:
    model("a", MIB)
    path = file(
        '[daemon]\ndevice = "host"\nbudget = "16MiB"\n',
        '[stages.first]\ncommand = "./vllm serve a"\nready = "ended"\n',
        '[stages.between]\ncommand = "true"\nafter = ["first"]\n',
        '[stages.then]\ncommand = "./vllm serve a"\nafter = ["between"]\n',
    )
    assert swapd("run", path).stdout.count(" serve a") == 2
    path.write_text(path.read_text().replace('ready = "ended"', ""))
    assert "would both have a component called a" in swapd("run", path, status=1).stderr


def test_a_server_of_plain_vllm_beside_them_is_in_the_sum(
    card: fakecuda.Fake,
    omni: Callable[..., str],
    model: Callable[[str, int], Path],
    file: Callable[..., Path],
) -> None:
    model("text", GIB)
    serve = ["./vllm", "serve", "text", "--enforce-eager", "--port", "0"]
    plain = f"[stages.text]\ncommand = {json.dumps(serve)}\n"
    path = file(omni("voice", 3 * GIB), plain)
    said = swapd("run", path, status=1).stderr
    assert "text shares GPU 0 with stages of vLLM-Omni, and would take 92% of it" in said
    assert "say --gpu-memory-utilization or --kv-cache-memory-bytes in its command" in said
    path.write_text(
        path.read_text().replace('"--port"', '"--gpu-memory-utilization=0.25", "--port"')
    )
    found = swapd("run", "-n", path).stdout.splitlines()
    assert found[0].startswith(f"swapd serve --device cuda:0 --budget {(12 - 8) * GIB - GIB // 2} ")
    assert "vllm serve text --worker-cls swapd_client.vllm.worker.Worker " in found[-1]
    path.write_text(path.read_text().replace("0.25", "0.5"))
    assert "workspace (voice 2 GiB, text 6 GiB)" in swapd("run", path, status=1).stderr


@pytest.fixture
def olmo(card: fakecuda.Fake, tmp_path: Path) -> Callable[..., list[object]]:
    """A dry run of a server of OLMo-2-7B, 13.6 GiB, on a GPU of this size."""
    model = write(tmp_path / "olmo", *OLMO)

    def made(memory: str, *flags: str) -> list[object]:
        serve = (tmp_path / "vllm", "serve", model, "--max-model-len", "4096", *flags)
        return ["run", "-n", "--device-memory", memory, "--", *serve]

    return made


def option_of(line: str, name: str) -> str | None:
    return option(shlex.split(line), name)


def test_a_server_of_plain_vllm_that_does_not_fit_streams_as_a_stage_would_and_says_why(
    olmo: Callable[..., list[object]], tmp_path: Path
) -> None:
    done = swapd(*olmo("16GiB", "--max-num-seqs", "16"))
    daemon, server = done.stdout.splitlines()
    stage_alone = stage(0, "olmo", max_num_seqs=16, max_model_len=4096)
    (tmp_path / "stage").mkdir()
    gpu, settings, _ = planned(tmp_path / "stage", OLMO, "16GiB", stage_alone)
    assert f"--budget {gpu.budget_bytes} " in daemon
    assert f"--chunk {gpu.chunk_bytes} " in daemon
    assert server.count("--enforce-eager") == 1
    for key in ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len"):
        assert option_of(server, f"--{key.replace('_', '-')}") == str(settings[0][key])
    assert option_of(server, "--worker-cls") == "swapd_client.vllm.worker.Worker"
    ours = json.loads(option_of(server, "--additional-config") or "")["swapd"]
    assert ours == {"component": "olmo", "kv": "auto", "resident": "auto"}
    assert "olmo: without CUDA graphs, because GPU 0 cannot hold these: 16 GiB - " in done.stderr
    assert f"{gpu.streams[0].streamed} of its 32 layers stream" in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("offload", "cache"),
    [
        ("--cpu-offload-gb", f"--kv-cache-memory-bytes={4 * GIB}"),
        ("--cpu_offload_gb", "--kv_cache_memory_bytes=4G"),  # vLLM reads these alike
    ],
)
def test_its_own_flags_for_streaming_and_for_its_cache_count(
    olmo: Callable[..., list[object]], offload: str, cache: str
) -> None:
    named = ("--additional-config", '{"swapd": {"component": "text"}, "other": 1}')
    done = swapd(*olmo("16GiB", offload, "8", cache, "--enforce-eager", *named))
    server = done.stdout.splitlines()[1]
    assert json.loads(option_of(server, "--additional-config") or "") == {
        "swapd": {"component": "text", "cpu_offload_gb": 8.0, "kv": "auto"},
        "other": 1,
    }
    assert "--cpu-offload-gb" not in server, "it is there already"
    assert option_of(server, "--kv-cache-memory-bytes") == str(4 * GIB)
    assert server.count("--enforce-eager") == 1
    assert "22 of its 32 layers stream" in done.stderr


def test_in_a_budget_that_is_said_as_many_layers_stream_as_do_not_fit_it(
    olmo: Callable[..., list[object]],
) -> None:
    run, *words = olmo("16GiB")
    done = swapd(run, "--budget", "8GiB", *words)
    daemon, server = done.stdout.splitlines()
    assert f"--budget {8 * GIB} " in daemon
    assert daemon.endswith(": --budget")
    assert '"resident": "auto"' in server
    (streams,) = re.findall(r"(\d+) of its 32 layers stream", done.stderr)
    assert int(streams) > 16, "of those of a budget that is planned"


def test_a_server_of_plain_vllm_that_fits_is_started_as_before(
    olmo: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fakecuda.shown(monkeypatch, devices=16, total=80 * GIB):
        done = swapd(*olmo("80GiB"))
    daemon, server = done.stdout.splitlines()
    assert ": the weights of " in daemon
    assert "--enforce-eager" not in server
    assert done.stderr == ""


def test_one_that_does_not_fit_even_so_is_refused_with_the_sum(
    olmo: Callable[..., list[object]],
) -> None:
    said = swapd(*olmo("6GiB"), status=1).stderr
    assert "GPU 0 cannot hold these: 6 GiB - " in said
    assert "olmo, the largest that takes turns (" in said


def test_several_servers_of_plain_vllm_share_the_plan_in_which_one_streams(
    olmo: Callable[..., list[object]], file: Callable[..., Path], tmp_path: Path
) -> None:
    write(tmp_path / "small", *SHAPES["3B"])
    flags = "--max-model-len 4096 --max-num-seqs 16"
    stages = [
        f'[stages.{name}]\ncommand = "./vllm serve {name} {flags}"\n' for name in ("olmo", "small")
    ]
    done = swapd("run", "-n", "--device-memory", "16GiB", file(*stages))
    daemon, *servers = done.stdout.splitlines()
    assert daemon.endswith(": the budget in the plan")
    streams = {line.rpartition("# ")[2]: "resident" in line for line in servers}
    assert streams == {"olmo": True, "small": False}
    assert all(option_of(line, "--kv-cache-memory-bytes") for line in servers)


def test_servers_of_plain_vllm_share_room_for_the_weights_of_all(
    model: Callable[[str, int], Path], file: Callable[..., Path]
) -> None:
    stages = [
        f'[stages.{name}]\ncommand = "./vllm serve {model(name, mib * MIB).name}"\n'
        for name, mib in (("a", 100), ("b", 20))
    ]
    path = file('[daemon]\ndevice = "host"\n', *stages)
    daemon, *_ = swapd("run", "-n", path).stdout.splitlines()
    needed = int(100 * MIB * 1.05) + int(20 * MIB * 1.05)
    assert daemon.startswith(f"swapd serve --device host --budget {needed} ")
    assert ": the weights of " in daemon
    path.write_text(path.read_text() + '[stages.c]\ncommand = "true"\n')
    daemon, *_ = swapd("run", "-n", path).stdout.splitlines()
    assert daemon.endswith("# 1 GiB: the default on the host"), "c may register more"


def test_on_the_host_vllm_omni_runs_as_it_is_written(
    omni: Callable[..., str], file: Callable[..., Path], tmp_path: Path
) -> None:
    done = swapd("run", file('[daemon]\ndevice = "host"\nbudget = "16MiB"\n', omni("voice", MIB)))
    assert done.stdout.endswith(" serve voice --omni --deploy-config=voice-deploy.yaml\n")
    assert "vllm-omni runs with its own settings, since swapd plans it for GPUs only" in done.stderr
    advice = "have its --deploy-config name swapd's workers"
    assert advice not in done.stderr, "it names them already"
    (deployed := tmp_path / "voice-deploy.yaml").write_text('{"stages": [{"stage_id": 0}]}')
    words = ("vllm-omni", "serve", "voice", "--deploy-config", deployed)
    for said in (words, words[:2]):
        done = swapd("run", "-n", "-d", "host", "--budget", "16MiB", "--", *said, "--omni")
        assert advice in done.stderr


def test_one_daemon_for_two_gpus_cannot_have_settings_of_one(
    omni: Callable[..., str], file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHOWN, "9,10")
    stages = omni("voice", MIB), omni("face", MIB, devices="1")
    path = file('[daemon]\nhttp = "127.0.0.1:9470"\n', *stages)
    said = swapd("run", "-n", "--device-memory", "12GiB", path, status=1).stderr
    assert "daemon.http: the stages are on several GPUs" in said
    path.write_text(path.read_text().replace('http = "127.0.0.1:9470"', 'chunk = "32MiB"'))
    done = swapd("run", "-n", "--device-memory", "12GiB", path).stdout.splitlines()
    found = [line.split() for line in done if line.startswith("swapd serve")]
    assert [words[3] for words in found] == ["cuda:0", "cuda:1"]
    assert all("--chunk 32MiB" in " ".join(words) for words in found)


def test_a_model_in_the_cache_is_sized_by_its_id_and_one_that_is_not_is_refused(
    file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = file('[daemon]\ndevice = "host"\n[stages.a]\ncommand = "./vllm serve org/model"\n')
    for words in (["-n", path], ["-n", "-d", "host", "--", "vllm", "serve", "org/model"]):
        said = swapd("run", *words, status=1).stderr
        assert (
            f"org/model is neither a folder nor in the cache of Hugging Face at {tmp_path}" in said
        )
        assert "get it by `hf download org/model`" in said
    assert "--budget" in swapd("run", "-n", "--budget", "8MiB", *words[1:]).stdout
    folder = tmp_path / "hub" / "models--org--model"
    save(folder / "snapshots" / "c0ffee" / "model.safetensors", w=100 * MIB)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    for words in (["-n", path], ["-n", "-d", "host", "--", "vllm", "serve", "org/model"]):
        daemon, *_ = swapd("run", *words).stdout.splitlines()
        assert daemon.startswith(f"swapd serve --device host --budget {int(100 * MIB * 1.05)} ")
        assert daemon.endswith("the weights of org/model")
    assert "model" in swapd("plan", "org/model", "--device-memory", "1GiB").stdout
