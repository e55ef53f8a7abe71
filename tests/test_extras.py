"""An install without extras names the missing one and the remedy, and lists its abilities."""

import subprocess
import sys
from pathlib import Path

import pytest

from swapd import __version__, spawn
from swapd.shared.extras import EXTRA_OF

#: Runs the rest of the command line as a program in which these modules cannot be imported.
WITHOUT = Path(__file__).parent / "programs" / "without.py"
ALL = ",".join([*EXTRA_OF, "numpy", "safetensors", "diffusers", "accelerate", "vllm", "vllm_omni"])


def without(
    *arguments: str, blocked: str = ALL, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(WITHOUT), blocked, *arguments], capture_output=True, text=True
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert not fails or len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done


def test_the_base_install_says_its_version() -> None:
    assert without("swapd", "--version").stdout == f"swapd {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_the_base_install_says_what_its_commands_need(arguments: list[str]) -> None:
    said = without("swapd", *arguments).stdout
    assert said.startswith("usage: swapd ")
    assert "pip install 'swapd[daemon]'" in said


def test_the_base_install_refuses_a_command_by_what_it_lacks() -> None:
    for command in ("status", "serve", "bench"):
        assert "pip install 'swapd[daemon]'" in without("swapd", command, fails=True).stderr


def test_only_serve_needs_what_only_serve_uses(tmp_path: Path) -> None:
    flag = f"--runtime-dir={tmp_path / 'swapd'}"
    said = without("swapd", "serve", flag, blocked="uvloop", fails=True).stderr
    assert "uvloop" in said
    assert "pip install 'swapd[daemon]'" in said
    assert "--budget" in without("swapd", "serve", "--help", blocked="uvloop").stdout


#: Features that need torch, each in a client without it.
NEEDS_TORCH = {
    "attach": "client.attach(object())",
    "load": "client.load('a', '/nowhere')",
    "load_family": "client.load_family('a', '/nowhere', {})",
    "AsyncClient.load": """
async def load():
    async with await swapd_client.connect_async(FOLDER) as other:
        await other.load('a', '/nowhere')
asyncio.run(load())""",
}


@pytest.mark.parametrize("program", NEEDS_TORCH.values(), ids=NEEDS_TORCH)
def test_a_client_without_torch_says_which_extra_brings_it(program: str) -> None:
    with spawn.daemon(budget="64MiB") as daemon:
        whole = (
            f"import asyncio, sys, swapd_client\nFOLDER = {str(daemon.folder)!r}\n"
            "client = swapd_client.connect(FOLDER)\n"
            f"try:\n    exec({program!r})\n"
            "except ModuleNotFoundError as exc:\n    sys.exit(str(exc))"
        )
        said = without(whole, fails=True).stderr
    assert said.endswith("needs torch, which is not installed: pip install 'swapd[torch]'\n")


def test_a_client_without_opentelemetry_says_which_extra_brings_it(tmp_path: Path) -> None:
    program = (
        "import sys, swapd_client\n"
        f"try:\n    swapd_client.connect({str(tmp_path)!r}, tracing=True)\n"
        "except ModuleNotFoundError as exc:\n    sys.exit(str(exc))"
    )
    said = without(program, fails=True).stderr
    assert said.startswith("tracing=True needs opentelemetry")
    assert said.endswith(", which is not installed: pip install 'swapd[otel]'\n")


def test_a_client_without_torch_does_all_that_needs_none() -> None:
    with spawn.daemon(budget="64MiB") as daemon:
        without(
            "import swapd_client\n"
            f"with swapd_client.connect({str(daemon.folder)!r}) as client:\n"
            "    part = client.register('a', {'x': b'1234'})\n"
            "    client.update('a', {'x': b'5678'})\n"
            "    with client.acquire('a'):\n"
            "        assert bytes(part.view('x')) == b'5678'\n"
        )


@pytest.mark.parametrize(
    ("arguments", "blocked", "extra"),
    [
        (["demo"], "torch,transformers", "swapd[demo]"),
        (["demo"], "transformers", "swapd[demo]"),
        (["top"], "textual", "swapd[top]"),
        (["bench"], "torch", "swapd[torch]"),
        (["plan", "--vllm", "deploy.yaml", "a=1GiB"], "yaml", "swapd[torch]"),
        (["plan", "config.json"], "transformers,torch", "swapd[demo]"),
        (["serve", "--device=cuda:0", "--runtime-dir=swapd"], "cuda", "swapd[cuda]"),
        (["serve", "--http=127.0.0.1:0", "--runtime-dir=swapd"], "h11", "swapd[web]"),
    ],
)
def test_a_command_says_which_extra_it_lacks(
    arguments: list[str],
    blocked: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "deploy.yaml").write_text("stages: []")
    root = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'client'}")
    monkeypatch.chdir(tmp_path)
    assert (
        f"pip install '{extra}'" in without("swapd", *arguments, blocked=blocked, fails=True).stderr
    )
