"""The package of `make package` can be unpacked, installed elsewhere, and removed again."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from swapd import __version__
from tests.processes import ROOT

DIST = ROOT / "dist"
#: Tests that need the sources of both packages, the tests beside them, and a builder of wheels.
SMALL_PART = "tests/test_units.py tests/test_layers.py"
WITHOUT_TORCH = (
    "import sys, swapd, swapd_client; "
    "print('torch' in sys.modules, swapd.__version__, swapd_client.__version__)"
)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The output of a command that does not see this tree. It must exit with 0."""
    done = subprocess.run(
        ["env", "-u", "PYTHONPATH", *map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def built(pattern: str) -> Path:
    (path,) = DIST.glob(pattern)
    return path


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"swapd-{__version__}"


def test_the_sdist_holds_every_file_of_the_tree(unpacked: Path) -> None:
    tracked = set(run("git", "ls-files").split("\n")) - {""}
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert there - {"PKG-INFO"} == tracked


def test_make_works_from_the_unpacked_sdist(unpacked: Path) -> None:
    (unpacked / ".venv").symlink_to(sys.prefix)
    run("make", "-o", ".venv/ready", "lint", cwd=unpacked)
    said = run("make", "-o", ".venv/ready", "unit", f"UNIT={SMALL_PART}", cwd=unpacked)
    assert f"rootdir: {unpacked}\n" in said
    assert " passed" in said


def test_the_wheel_has_types_and_entry_points_and_no_tests() -> None:
    wheel = zipfile.ZipFile(built("*.whl"))
    info = f"swapd-{__version__}.dist-info"
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "[console_scripts]\nswapd = swapd.cli:main\n" in entry_points
    for group in ("vllm.general_plugins", "vllm_omni.general_plugins"):
        assert f"[{group}]\nswapd = swapd_client.vllm:register\n" in entry_points
    names = wheel.namelist()
    assert {"swapd/py.typed", "swapd_client/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "client/"))]


def test_the_long_description_names_no_file_of_the_tree() -> None:
    wheel = zipfile.ZipFile(built("*.whl"))
    metadata = wheel.read(f"swapd-{__version__}.dist-info/METADATA").decode()
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", metadata, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"""\]\(([^)]*)\)|(?:href|src|srcset)=["']([^"']*)""", prose)
    assert "Description-Content-Type: text/markdown" in metadata
    assert [target for pair in targets for target in pair if target and "//" not in target] == []


def test_an_installed_wheel_runs_without_torch_and_leaves_nothing(
    interpreter: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    run(interpreter, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "msgspec", "pyzmq")
    before = contents(environment)

    run(*pip, "install", "--no-index", built("*.whl"))
    help_text = run(environment / "bin" / "swapd", "--help", cwd=tmp_path)
    assert help_text.startswith("usage: swapd ")
    said = run(python, "-c", WITHOUT_TORCH, cwd=tmp_path)
    assert said.split() == ["False", __version__, __version__]

    assert contents(environment) > before
    run(*pip, "uninstall", "--yes", "swapd")
    assert contents(environment) == before


def contents(environment: Path) -> set[Path]:
    """All paths of an environment, except pip's."""
    return {path for path in environment.rglob("*") if "pip" not in path.parts}
