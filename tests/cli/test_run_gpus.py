"""`swapd run` and $CUDA_VISIBLE_DEVICES: each number means one GPU, or the run is refused.

A stub of the CUDA driver has 16 GPUs. Each daemon that a test starts has a GPU of its own, because
`swapd run` looks at all daemons of this user.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swapd.cli import serve
from swapd.run import gpus
from swapd.run.daemons import DaemonSpec, ServingDaemon, endpoint_of
from swapd.shared import config
from swapd.shared.config import ConfigError, gpus_in, listed_gpus
from tests import fakecuda

from .conftest import swapd
from .test_run_planned import GIB, MIB, home, model, omni

__all__ = ["home", "model", "omni"]
UUIDS = [f"GPU-fa4ec0da-0013-4000-8000-5a5a5a5a5a{n:02x}" for n in range(16)]
SHOWN = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakecuda.Fake]:
    with fakecuda.shown(monkeypatch, devices=16, total=12 * GIB) as fake:
        monkeypatch.delenv(SHOWN, raising=False)
        yield fake


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda listed: monkeypatch.setenv(SHOWN, listed)


@pytest.fixture
def voice(omni: Callable[..., str], tmp_path: Path) -> Callable[..., list[object]]:
    """Makes a command of vLLM-Omni whose stage is on the given GPUs."""

    def made(devices: str, **stage: object) -> list[object]:
        omni("voice", 100 * MIB, devices=devices, **stage)
        file = f"--deploy-config={tmp_path}/voice-deploy.yaml"
        return [tmp_path / "vllm-omni", "serve", tmp_path / "voice", "--omni", file]

    return made


def daemons(*words: object) -> list[str]:
    """The devices, and the names of the folders, of the daemons of a dry run."""
    lines = [line.split() for line in swapd("run", "-n", *words).stdout.splitlines()]
    serves = [words for words in lines if words[:2] == ["swapd", "serve"]]
    return [f"{one[3]} in {Path(one[one.index('--runtime-dir') + 1]).name}" for one in serves]


# --- meaning of a number -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("12,11", "cuda:1 in cuda11"),
        (" 11 , 12 ", "cuda:1 in cuda12"),
        (f"{UUIDS[2]},{UUIDS[13]}", "cuda:1 in cuda-5a5a5a5a5a0d"),
    ],
)
def test_a_daemon_is_on_the_gpu_that_its_stage_counts_and_its_folder_has_the_machine_s_number(
    voice: Callable[..., list[object]],
    shows: Callable[[str], None],
    cards: fakecuda.Fake,
    listed: str,
    found: str,
    folder: Path,
) -> None:
    shows(listed)
    assert daemons("--", *voice("1")) == [found]
    done = swapd("run", "--", *voice("1"))
    assert done.stdout.startswith(f"{folder}/swapd/{found.partition(' in ')[2]} serve ")


def test_a_daemon_of_the_first_of_several_gpus_says_so(
    shows: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(config, "_DEVICES", tmp_path)
    for listed in ("5", "3,5"):
        shows(listed)
        assert serve.usual() == "cuda:0"
    assert caplog.messages == ["of 2 GPUs this serves cuda:0; --device takes another"]


def test_a_gpu_has_every_name_that_swapd_serve_takes(
    shows: Callable[[str], None], cards: fakecuda.Fake
) -> None:
    shows("7,8")
    assert daemons("--budget", "1GiB", "-d", "cuda1", "--", "true") == ["cuda1 in cuda8"]
    with cards.occupied(4 * GIB, pid=1, gpu=8):
        (line,) = swapd("run", "-n", "-d", "cuda1", "--", "true").stdout.splitlines()[:1]
    assert f"--budget {int(8 * GIB * 0.7)} " in line
    said = swapd("run", "-d", "cuda2", "--", "true", status=1).stderr
    assert "-d cuda2: there is no such GPU" in said


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("host", "host"), "-d host: several are for GPUs alone; leave it out"),
        (("cuda", "cuda0"), "-d cuda0: another is for this GPU; leave one of them out"),
    ],
)
def test_several_daemons_are_for_different_gpus(devices: tuple[str, str], said: str) -> None:
    options = [word for device in devices for word in ("-d", device)]
    assert said in swapd("run", *options, "--budget", "8MiB", "--", "true", status=1).stderr


def test_the_free_memory_is_that_of_the_gpu_that_is_shown(
    cards: fakecuda.Fake, shows: Callable[[str], None]
) -> None:
    shows("6")
    with cards.occupied(4 * GIB, pid=1, gpu=0):
        (line,) = swapd("run", "-n", "-d", "cuda:0", "--", "true").stdout.splitlines()[:1]
    assert f"--budget {int(12 * GIB * 0.7)} " in line


def test_a_daemon_of_another_gpu_under_the_same_number_is_not_joined(
    shows: Callable[[str], None],
) -> None:
    shows("14")

    def inner(visible: str, device: str) -> list[str]:
        run = f"run --budget 64MiB -d {device} -- true"
        return ["env", f"{SHOWN}={visible}", sys.executable, "-m", "swapd", *run.split()]

    run = ("run", "--budget", "64MiB", "-d", "cuda:0", "--")
    anew = {"everywhere": False}  # the environment of a process is that of its first program
    done = swapd(*run, *inner("15", "cuda:0"), **anew)
    assert "cuda14 (process " in done.stderr
    assert "cuda15 (process " in done.stderr, "not the one of GPU 14"
    done = swapd(*run, *inner(f"0,{UUIDS[14]}", "cuda:1"), **anew)
    assert "cuda14 (joined)" in done.stderr


def test_a_server_of_plain_vllm_is_shown_the_gpus_of_its_daemons(
    tmp_path: Path, model: Callable[[str, int], Path], shows: Callable[[str], None]
) -> None:
    (vllm := tmp_path / "vllm").write_text(f'#!/bin/sh\necho "${SHOWN}" "$@"\n')
    serve = [vllm, "serve", model("text", 64 * MIB)]
    assert swapd("run", "-d", "cuda:2", "--", *serve).stdout.startswith("2 serve ")
    shows("3,4")
    assert swapd("run", "-d", "cuda:1", "--", *serve).stdout.startswith("4 serve ")
    for kind in ("tensor", "pipeline"):
        two = daemons("--", *serve, f"--{kind}-parallel-size", "2")
        assert two == ["cuda:0 in cuda3", "cuda:1 in cuda4"]
    said = swapd("run", "--", *serve, "--tensor-parallel-size=3", status=1).stderr
    assert "needs 3 GPUs (--tensor-parallel-size times --pipeline-parallel-size)" in said
    assert f"and {SHOWN}=3,4 shows cuda:0, cuda:1" in said
    said = swapd("run", "-d", "cuda:1", "--", *serve, "--tensor-parallel-size=2", status=1).stderr
    assert "-d names cuda:1: name more of them, or divide it among 1" in said
    said = swapd("run", "--", *serve, "-pp", "2", "-tp=2", status=1).stderr
    assert "needs 4 GPUs" in said


# --- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "device", "said"),
    [
        (
            "1",
            "cuda:1",
            "-d cuda:1: there is no such GPU, since CUDA_VISIBLE_DEVICES=1 shows cuda:0",
        ),
        ("", "cuda:0", "since CUDA_VISIBLE_DEVICES is empty, which hides all GPUs: say one of"),
        (None, "cuda:16", "since this machine has cuda:0, cuda:1, cuda:2,"),
    ],
)
def test_a_gpu_that_is_not_shown_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    voice: Callable[..., list[object]],
    listed: str | None,
    device: str,
    said: str,
) -> None:
    if listed is not None:
        monkeypatch.setenv(SHOWN, listed)
    assert said in swapd("run", "-d", device, "--", "true", status=1).stderr
    (path := tmp_path / "run.toml").write_text(
        f'[daemon]\ndevice = "{device}"\n[stages.a]\ncommand = "true"\n'
    )
    assert f"{path}: daemon.device {device}: there is no" in swapd("run", path, status=1).stderr
    said_of = swapd("run", "--", *voice(device[5:]), status=1).stderr
    assert f"voice-deploy.yaml: stage 0 (voice) is on GPU {device[5:]} by its devices" in said_of
    assert "Nothing was started" in said_of
    assert not (tmp_path / "state").exists()


def test_a_stage_on_another_gpu_than_the_daemons_is_refused(
    voice: Callable[..., list[object]], shows: Callable[[str], None]
) -> None:
    shows("9,10")
    said = swapd("run", "-d", "cuda:0", "--", *voice("1"), status=1).stderr
    assert "is on GPU 1 by its devices, and the daemons are for cuda:0" in said
    both = voice("0,1", tensor_parallel_size=2)
    assert (
        "is on GPU 1 by its devices" in swapd("run", "-d", "cuda:0", "--", *both, status=1).stderr
    )
    assert daemons("--", *both) == ["cuda:0 in cuda9", "cuda:1 in cuda10"]


def test_several_gpus_by_uuid_are_refused_before_any_daemon_starts(
    voice: Callable[..., list[object]], shows: Callable[[str], None]
) -> None:
    shows(",".join(UUIDS))
    done = swapd("run", "--", *voice("0,1", tensor_parallel_size=2), status=1)
    assert "names GPUs by UUID, and of several daemons (cuda:0, cuda:1)" in done.stderr
    assert "list numbers there" in done.stderr
    assert "swapd on" not in done.stderr


def test_what_a_stage_is_shown_is_held_against_the_daemons_of_its_file(
    tmp_path: Path,
    omni: Callable[..., str],
    model: Callable[[str, int], Path],
    shows: Callable[[str], None],
) -> None:
    shows("5,9")
    model("text", 64 * MIB)
    path = tmp_path / "run.toml"

    def text(device: str, shown: str) -> Path:
        env = f'env = {{{SHOWN} = "{shown}"}}'
        stage = f'[stages.text]\ncommand = "./vllm serve text"\n{env}\n'
        path.write_text(f'[daemon]\ndevice = "{device}"\n{stage}')
        return path

    said = swapd("run", text("cuda:0", "9"), status=1).stderr
    assert f"stages.text.env.{SHOWN} = 9: the stage needs 1 GPU of the daemons" in said
    assert "which are on cuda:0 (GPU 5): list one of these, or leave it out" in said
    for shown in ("9", UUIDS[9], "9,5"):
        assert daemons(text("cuda:1", shown)) == ["cuda:1 in cuda9"]
    assert "the stage needs 1 GPU" in swapd("run", text("cuda:1", ""), status=1).stderr
    path.write_text(omni("voice", MIB) + f'env = {{{SHOWN} = "1"}}\n')
    said = swapd("run", path, status=1).stderr
    assert "the GPUs of a server of vLLM-Omni are the devices of its deploy file" in said


# --- messages ------------------------------------------------------------------------------


def test_a_folder_above_those_of_the_daemons_may_be_called_as_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/cuda0")
    wanted = [DaemonSpec(f"cuda:{n}", 1, "") for n in range(2)]
    there = [ServingDaemon(one, one.folder, 1, None) for one in wanted]
    assert endpoint_of(there) == "/run/cuda0/swapd/cuda{gpu}"


@pytest.mark.parametrize(
    ("said", "found"),
    [("0, 2", ("0", "2")), ("", ()), ("-1", ()), ("1,-1,0", ("1",)), ("GPU-8f,3", ("GPU-8f", "3"))],
)
def test_a_list_ends_before_the_first_that_is_no_gpu(said: str, found: tuple[str, ...]) -> None:
    assert gpus_in(said) == found


def test_names_of_one_gpu_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.same("1", "1")
    assert not gpus.same("1", "2")
    assert gpus.same("GPU-8f1c-2", "GPU-8f1c")
    assert not gpus.same("GPU-8f1c", "GPU-77aa")
    assert not gpus.same("host", "0")
    assert gpus.same("host", "host")
    monkeypatch.setenv(SHOWN, "3")
    assert listed_gpus() == ("3",)
    assert DaemonSpec("cuda:0", 1, "").folder.name == "cuda3"
    with pytest.raises(ConfigError, match="shows cuda:0"):
        gpus.check(["cuda:1"], "-d")
