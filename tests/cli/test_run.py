"""`swapd run` gives a command a daemon, signals and an exit status, and leaves nothing behind."""

import json
import os
import select
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swapd.plan.advice import PlanError
from swapd.run import budgets
from swapd.run.commands import command_of, number_of, option, without
from swapd.run.daemons import DaemonSpec, ServingDaemon, joinable
from swapd.shared import config
from swapd.shared.units import size
from swapd_client.errors import SwapdError
from tests.files import file_with
from tests.plan import omni
from tests.processes import line_of

from .conftest import environment, serve, start, swapd

MIB = 1 << 20
PROGRAM = Path(__file__).parents[1] / "programs" / "uses_swapd.py"


@pytest.fixture(autouse=True)
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of daemons without a named one; runs are recorded beside it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return folder / "swapd" / "host"


def _daemon_of(process: "subprocess.Popen[str]") -> int:
    """The pid of the daemon that `swapd run` says it has started."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "swapd on host at" in line, line
    return int(line.partition("(process ")[2].partition(")")[0])


@pytest.fixture
def waiting() -> Iterator["subprocess.Popen[str]"]:
    """A run whose command has used its daemon, and waits for a signal."""
    process = start("run", "--budget", "16MiB", sys.executable, PROGRAM, "wait")
    yield process
    process.kill()
    process.communicate()


def _until_used(process: "subprocess.Popen[str]") -> None:
    assert line_of(process) == "used\n"


# --- runs --------------------------------------------------------------------------------


def test_a_folder_that_was_removed_under_the_shell_is_said(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    program = "import os, swapd.cli as cli; os.rmdir(os.getcwd()); cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--", "true"],
        env=environment(),
        cwd=gone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the folder in which this command runs was removed: cd to another" in done.stderr


def test_a_command_finds_its_daemon_and_a_sum_is_told(home: Path) -> None:
    done = swapd("run", "--budget", "16MiB", "--", sys.executable, PROGRAM, "end")
    assert done.stdout == "used\n"
    told = done.stderr.splitlines()[-1]
    assert told.startswith("swapd: host: 3 swaps, 36 MiB in and 0 B out; ")
    assert told.endswith("at most 12 MiB of 16 MiB used")
    assert "no swapd at" in swapd("status", "-e", home, status=1).stderr


@pytest.mark.parametrize(
    "mutable", [False, True], ids=["of a session that has ended", "of a component that was saved"]
)
def test_memory_that_is_used_again_is_counted_once(mutable: bool) -> None:
    program = f"""
import swapd_client
def use(name):
    client.register(name, {{"w": bytearray(name.encode().ljust({12 * MIB}))}}, mutable={mutable})
    client.acquire(name).release()
client = swapd_client.connect()
use("thinker")
if not {mutable}:
    client.close()
    client = swapd_client.connect()
use("talker")
"""
    done = swapd("run", "--budget", "16MiB", "--", sys.executable, "-c", program)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("swapd: host: 2 swaps, ")
    assert told.endswith("at most 12 MiB of 16 MiB used")


def test_its_daemon_is_there_until_the_command_ends() -> None:
    use = shlex.join([sys.executable, str(PROGRAM), "end"])
    command = ("run", "--budget", "16MiB", "--", "sh", "-c", f"{use} && {use}")
    done = swapd(*command, env=environment(SWAPD_LINGER="1ms"))  # of daemons that clients start
    assert "swapd: host: 6 swaps, 72 MiB in and 0 B out; " in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_status_is_the_command_s(
    waiting: "subprocess.Popen[str]", number: signal.Signals, home: Path
) -> None:
    _daemon_of(waiting)
    _until_used(waiting)
    waiting.send_signal(number)
    out, err = waiting.communicate(timeout=60)
    assert (out, waiting.returncode) == (f"{number.name}\n", 7), err
    assert "3 swaps" in err
    assert "no swapd at" in swapd("status", "-e", home, status=1).stderr


def test_a_run_that_is_killed_leaves_neither_daemon_nor_command(
    waiting: "subprocess.Popen[str]",
) -> None:
    daemon = os.pidfd_open(_daemon_of(waiting))
    try:
        _until_used(waiting)
        waiting.kill()
        poll = select.poll()
        poll.register(daemon, select.POLLIN)
        assert poll.poll(60_000), "the daemon goes on"
        assert waiting.communicate(timeout=60)[0] == "SIGTERM\n"
    finally:
        os.close(daemon)


def test_a_daemon_that_is_there_is_joined_and_stays(home: Path) -> None:
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    home.chmod(0o700)
    daemon = serve(home, budget="20MiB")
    try:
        done = swapd("run", "--budget", "16MiB", "--", sys.executable, PROGRAM, "end")
        assert f"swapd on host at {home} (joined)" in done.stderr
        assert "of 20 MiB used" in done.stderr
        assert daemon.process.poll() is None
        done = swapd("run", "--", sys.executable, PROGRAM, "end")  # nobody asked for a budget
        assert f"swapd on host at {home} (joined), 20 MiB\n" in done.stderr
        (line, _) = swapd("run", "-n", "--", "true").stdout.splitlines()
        assert line == f"joins the one at {home}    # 20 MiB: its own budget"
        said = swapd("run", "--budget", "1GiB", "--", "true", status=1).stderr
        assert f"the swapd at {home} has a budget of 20 MiB on host, and 1 GiB is needed" in said
        assert f"`swapd stop --endpoint {home}`, or give --budget 20MiB" in said
        planned = DaemonSpec("host", 16 * MIB, "the budget in the plan", chunk=2 * MIB)
        assert joinable(planned) == ServingDaemon(planned, home, 20 * MIB, None)
        with pytest.raises(
            SwapdError, match="in chunks of 2 MiB, and the budget in the plan counts"
        ):
            joinable(planned._replace(chunk=MIB))
    finally:
        daemon.stop()


def test_a_run_whose_joined_daemon_ends_before_it_says_why_that_may_be(
    waiting: "subprocess.Popen[str]", home: Path
) -> None:
    _until_used(waiting)
    end = f"kill {waiting.pid}; while [ -e {home}/lifeline.sock ]; do :; done"
    said = swapd("run", "--", "sh", "-c", end).stderr
    assert f"swapd on host at {home} (joined)" in said
    assert "one that another `swapd run` has started ends with that run" in said


@pytest.mark.parametrize("how", ["command", "file"])
def test_its_daemon_has_the_settings_of_the_environment(tmp_path: Path, how: str) -> None:
    text = "[stages.a]\ncommand = 'true'\n"
    words = ["--", "true"] if how == "command" else [file_with(tmp_path / "run.toml", text)]
    own = environment(SWAPD_BUDGET="24MiB", SWAPD_DEVICE="cuda7")
    line, *_ = swapd("run", "-n", *words, env=own).stdout.splitlines()
    assert line.startswith(f"swapd serve --device cuda7 --budget {24 * MIB} ")
    if how == "command":
        (line, _) = swapd("run", "-n", "-d", "host", *words, env=own).stdout.splitlines()
        assert line.startswith(f"swapd serve --device host --budget {24 * MIB} ")
    own = environment(SWAPD_BUDGET="lots")
    said = swapd("run", "-n", *words, env=own, status=1).stderr
    assert "$SWAPD_BUDGET: 'lots' is not a size" in said


def test_without_a_driver_it_takes_the_device_that_swapd_serve_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(config, "_DEVICES", tmp_path)
    monkeypatch.delenv(config.VISIBLE_VARIABLE, raising=False)
    assert budgets.devices() == [config.usual_device()] == ["cuda:0"]
    with pytest.raises(PlanError, match=r"free memory of cuda:0 is unknown .* or -d host"):
        budgets.wanted([command_of(["true"])], [], None)


def test_a_signal_that_is_ignored_as_under_nohup_is_not_passed_on(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "swapd", "run", "--budget", "8MiB", "--"]
    command = [*run, "sh", "-c", "kill -HUP $PPID; exit 3"]
    done = subprocess.run(
        ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *command], env=environment(), timeout=60
    )
    assert done.returncode == 3


def test_a_command_that_is_not_there_is_one_clear_line(home: Path, tmp_path: Path) -> None:
    done = swapd("run", "--budget", "8MiB", "--", "no-such-command", status=127)
    assert done.stderr.splitlines()[-1] == (
        "swapd: there is no command 'no-such-command': install it, or write its whole path"
    )
    (text := tmp_path / "text").write_text("no program")
    done = swapd("run", "--budget", "8MiB", "--", text, status=126)
    assert "cannot be run: Permission denied" in done.stderr


def test_a_daemon_that_cannot_start_says_why_and_nothing_is_run(tmp_path: Path) -> None:
    done = swapd("run", "--budget", "1TiB", "--", "touch", tmp_path / "ran", status=1)
    assert "1 TiB" in done.stderr
    assert "swapd: swapd: " not in done.stderr
    assert not (tmp_path / "ran").exists()


# --- planned -----------------------------------------------------------------------------


def test_settings_in_a_file_are_those_of_the_daemon_and_options_go_first(tmp_path: Path) -> None:
    (path := tmp_path / "better.toml").write_text(
        'budget = "16MiB"\nchunk = "4MiB"\npatience = 9\n'
    )
    run = ("run", "-n", "--config", path)
    daemon, _ = swapd(*run, "--", "true").stdout.splitlines()
    for given in ("--budget 16777216 ", "--chunk 4MiB ", "--patience 9 "):
        assert given in daemon
    daemon, _ = swapd(
        *run, "--budget", "8MiB", "--set", "patience=7", "--", "true"
    ).stdout.splitlines()
    for given in ("--budget 8388608 ", "--chunk 4MiB ", "--patience 7 "):
        assert given in daemon
    for text, said in (
        ('chnk = "4MiB"', "chnk is not a setting; did you mean chunk?"),
        ('budget = "x"', "budget: 'x' is not a size"),
        ('runtime_dir = "x"', "runtime_dir: swapd run chooses it; leave it out"),
    ):
        path.write_text(text)
        assert f"{path}: {said}" in swapd(*run, "--", "true", status=1).stderr
    path.unlink()
    assert f"{path}: No such file" in swapd(*run, "--", "true", status=1).stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    save_file({"model.w": torch.zeros(4 * MIB)}, made / "model.safetensors")
    return made


def test_a_server_of_vllm_gets_its_worker_and_a_budget_for_its_weights(
    model: Path, tmp_path: Path
) -> None:
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$SWAPD_ENDPOINT" "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    done = swapd("run", "--", fake, "serve", model, "--port", "0")
    assert done.stdout.split()[1:] == [
        "serve",
        str(model),
        "--worker-cls",
        "swapd_client.vllm.cpu.CPUWorker",
        "--port",
        "0",
    ]
    assert f"swapd on host at {done.stdout.split()[0]}" in done.stderr
    assert f", {size(int(16 * MIB * 1.05))}" in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--config", "serve.yaml"], "--config FILE"),
        (["--config=serve.yaml", "--additional_config.swapd.component=a"], "--config FILE and "),
        (["--additional-config.swapd.component", "a"], "--additional-config.NAME"),
    ],
)
def test_options_of_a_server_that_are_written_where_nobody_looks_are_told(
    words: list[str], named: str, model: Path
) -> None:
    done = swapd("run", "-n", "-d", "host", "--", "vllm", "serve", model, *words)
    assert f"swapd: vllm serve: swapd does not read {named}" in done.stderr
    assert "write it into the command itself: --worker-cls, --tensor-parallel-size" in done.stderr
    assert done.stdout.rstrip().endswith(words[-1].replace("l_c", "l-c")), "it is passed on"
    other = swapd("run", "-n", "-d", "host", "--", "python", *words)
    assert other.stderr == ""


def test_a_model_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    made = tmp_path / "model"
    made.mkdir()
    header = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    encoded = json.dumps(header).encode()
    (made / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(made / "model.safetensors", 8 + len(encoded) + (1 << 42))
    said = swapd("run", "--", "vllm", "serve", made, status=1).stderr
    assert "needs 4.2 TiB for its weights, and " in said
    assert said.rstrip().endswith("nothing was started")


def test_omni_is_planned_and_gets_the_overlay(tmp_path: Path) -> None:
    stages = [
        {"stage_id": n, "devices": "5", "additional_config": {"swapd": {"component": name}}}
        for n, name in enumerate(("thinker", "talker"))
    ]
    base = file_with(tmp_path / "omni.yaml", json.dumps({"stages": stages}))
    model = omni.qwen3(tmp_path / "Qwen3-Omni")
    words = ("vllm-omni", "serve", model, "--omni", f"--deploy-config={base}")
    done = swapd("run", "-n", "--device-memory", "80GiB", "--", *words)
    assert "swapd serve --device cuda:5 --budget " in done.stdout  # no other test has this GPU
    assert f" --chunk {64 << 20} " in done.stdout, "as the plan counts"
    assert done.stdout.count("worker_cls: swapd_client.vllm.omni.ARWorker") == 2
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"vllm-omni serve {model} --deploy-config ")
    assert last.endswith("deploy.yaml --omni")
    streams = swapd("run", "-n", "--device-memory", "40GiB", "--", *words).stdout
    assert "swapd: {component: thinker, kv: auto, resident: auto}" in streams
    said = swapd("run", "-n", "--device-memory", "12GiB", "--", *words, status=1).stderr
    assert "GiB" in said
    assert not (tmp_path / "swapd").exists(), "a dry run has written something"
    found = omni.installed(tmp_path / "site", base)
    done = swapd("run", "-n", "--device-memory", "80GiB", "--", found, *words[1:4])
    assert done.stderr == (
        f"swapd: the deploy file is {tmp_path}/site/vllm_omni/deploy/qwen3.yaml: model_type "
        "qwen3_omni_moe\n"
    )
    assert done.stdout.count("worker_cls: swapd_client.vllm.omni.ARWorker") == 2
    assert "base_config: " + str(tmp_path / "site/vllm_omni/deploy/qwen3.yaml") in done.stdout
    done = swapd("run", "-n", "-d", "cuda:6", "--device-memory", "80GiB", "--", found, *words[1:4])
    assert "swapd: thinker is placed on GPU 6, not 5\n" in done.stderr
    assert "swapd serve --device cuda:6 " in done.stdout
    assert "cuda:5" not in done.stdout
    (model / "config.json").write_text('{"model_type": "nobodys"}')
    said = swapd("run", "-n", "--", found, *words[1:4], status=1).stderr
    assert "no pipeline is for model_type nobodys. Name a deploy file: --deploy-config F" in said
    said = swapd("run", "-n", "--", found, "serve", "org/model", "--omni", status=1).stderr
    assert "org/model is neither a folder nor in the cache of Hugging Face at " in said
    assert "get it by `hf download org/model`" in said
    said = swapd("run", "-n", "--", *words[:4], status=1).stderr
    assert "Name a deploy file: --deploy-config FILE" in said


def test_runs_that_start_in_one_second_keep_their_files_apart(tmp_path: Path) -> None:
    own = {"stage_id": 0, "devices": "5", "additional_config": {"swapd": {"component": "thinker"}}}
    base = file_with(tmp_path / "omni.yaml", json.dumps({"stages": [own]}))
    model = omni.qwen3(tmp_path / "Qwen3-Omni")
    words = ("vllm-omni", "serve", model, "--omni", f"--deploy-config={base}")
    runs = [start("run", "-n", "--device-memory", "80GiB", "--", *words) for _ in range(2)]
    said = [run.communicate(timeout=60)[0].splitlines()[-1] for run in runs]
    assert said[0].startswith("vllm-omni serve "), said
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("words", "kind", "model"),
    [
        (["vllm", "serve", "m"], "vllm", "m"),
        (["/venv/bin/vllm", "serve", "--port", "1", "--model", "m"], "vllm", "m"),
        (["vllm", "serve", "m", "--omni"], "vllm-omni", "m"),
        (["vllm-omni", "serve", "m", "--omni"], "vllm-omni", "m"),
        (["python3", "-m", "vllm", "serve", "m"], "vllm", "m"),
        (["python3", "-m", "vllm_omni.entrypoints", "serve", "--model=m"], "vllm-omni", "m"),
        (["vllm", "bench", "m"], "other", None),
        (["python", "serve.py"], "other", None),
        (["vllm"], "other", None),
    ],
)
def test_commands_are_known_by_their_words(words: list[str], kind: str, model: str | None) -> None:
    command = command_of(words)
    assert (command.kind, command.model) == (kind, model)


def test_numbers_are_read_as_vllm_reads_them() -> None:
    texts = ("4096", "4k", "4K", "25.6k", "2M", "4G", "1.5g")
    assert [*map(number_of, texts)] == [4096, 4000, 4096, 25600, 2 << 20, 4 << 30, 1_500_000_000]
    for text in ("4GiB", "1.5G", "4 G", "many"):
        with pytest.raises(ValueError, match="invalid literal"):
            number_of(text)


@pytest.mark.parametrize("program", ["vllm", "vllm-omni"])
def test_options_of_a_server_may_have_underscores(program: str) -> None:
    words = ["--max_model_len", "a_b", "--c_d=e_f.g_h", "--i_j.k_l=m_n", "-o_p"]
    command = command_of([program, "serve", "m_m", *words])
    after = ("--max-model-len", "a_b", "--c-d=e_f.g_h", "--i-j.k_l=m_n", "-o_p")
    assert command.words == (program, "serve", "m_m", *after)
    assert command_of(["python", "--q_r", *words]).words == ("python", "--q_r", *words)


def test_options_are_found_and_replaced_however_they_are_written() -> None:
    words = ["vllm", "serve", "m", "--a=1", "--b", "2", "--a", "3"]
    assert option(words, "--a") == "3"
    assert option(words, "--c") is None
    assert without(words, "--a") == ("vllm", "serve", "m", "--b", "2")
    assert command_of(words).with_option("--a", "9").words == (
        *("vllm", "serve", "m", "--a", "9", "--b", "2"),
    )
    assert command_of(["vllm", "serve", "--model", "m"]).with_option("--a", "9").words == (
        *("vllm", "serve", "--a", "9", "--model", "m"),
    )


@pytest.mark.parametrize(
    ("words", "status"), [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], 137)]
)
def test_the_status_is_the_command_s(words: list[str], status: int) -> None:
    swapd("run", "--budget", "8MiB", "--", *words, status=status)


def test_no_command_is_one_clear_line() -> None:
    assert "give a command after --, or a file" in swapd("run", status=2).stderr
