"""The allowed imports, seen from outside: in fresh interpreters, and in the built wheel."""

import ast
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import swapd
import swapd_client
from swapd.cli.app import COMMANDS
from tests.once import made_once
from tests.processes import ROOT, output_of


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(output_of(program, anew=True).split())


def test_importing_swapd_loads_nothing_else() -> None:
    """The client imports `swapd.shared.protocol`, and through it this package."""
    assert not loaded_by("import swapd") & {"zmq", "uvloop", "ctypes", "msgspec", "asyncio"}


def test_swapd_has_the_names_of_its_client_and_loads_it_for_them_alone() -> None:
    assert all(getattr(swapd, n) is getattr(swapd_client, n) for n in swapd_client.__all__)
    assert "swapd_client" in loaded_by("import swapd; swapd.connect")
    assert "swapd_client" not in loaded_by("from swapd import spawn, __version__")
    assert not hasattr(swapd, "no_such_name")
    assert "connect" in dir(swapd)


def test_the_client_loads_neither_torch_nor_the_daemon() -> None:
    loaded = loaded_by("import swapd_client")
    assert {"msgspec", "zmq"} <= loaded
    assert not loaded & {"torch", "numpy", "uvloop", "vllm", "typer", "rich"}


def test_both_packages_say_the_same_version() -> None:
    assert swapd_client.__version__ == swapd.__version__


def test_what_users_meet_is_exported_and_torch_is_loaded_for_attachment_alone() -> None:
    names = "InvalidArgument, Status, Forecast, SessionEnded"
    assert "torch" not in loaded_by(f"from swapd_client import {names}")
    assert "torch" in loaded_by("from swapd_client import Attachment")


def test_the_daemon_loads_no_torch() -> None:
    program = "import swapd.daemon; from swapd.cli.app import app_of; app_of()"
    assert not loaded_by(program) & {"torch", "numpy", "vllm"}


def test_a_command_loads_no_other_command() -> None:
    """So `swapd serve` starts in half of the time."""
    program = (
        "import sys; from swapd.cli.app import app_for; app_for(['serve']); print(*sys.modules)"
    )
    loaded = set(output_of(program, anew=True).split())
    assert {name for name in COMMANDS.values() if f"swapd.cli.{name}" in loaded} == {"serve"}


def imports(path: Path) -> set[str]:
    """All modules that a file imports, in functions too; some of the names may be no modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


@pytest.mark.parametrize("package", ["swapd", "client/swapd_client"])
def test_no_modules_import_each_other_late_or_early(package: str) -> None:
    """Without packages: an `__init__` imports its own modules for its users."""
    root = (ROOT / package).parent
    files = {
        str(path.relative_to(root))[:-3].replace("/", "."): path
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imports(path) & files.keys() for name, path in files.items()}
    assert list(TopologicalSorter(graph).static_order())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built with the installed packages; the tree is only read."""

    def build(folder: Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=True,
        )

    (path,) = made_once(tmp_path_factory, "wheel", build).iterdir()
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_has_both_packages_whole_and_typed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package, folder in (("swapd", ROOT), ("swapd_client", ROOT / "client")):
        sources = {str(p.relative_to(folder)) for p in (folder / package).rglob("*.py")}
        assert sources <= names
        assert f"{package}/py.typed" in names
    outside = {name for name in names if not name.startswith(("swapd/", "swapd_client/", "swapd-"))}
    assert not outside, "tests, docs or the client folder itself went in"


@pytest.mark.slow
def test_the_wheel_runs_from_where_it_is_unpacked(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = "import swapd, swapd_client, swapd.cli.app; print(swapd.__file__, swapd.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    path, version = done.stdout.split()
    assert Path(path).parent == tmp_path / "swapd"
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {version}\n" in wheel.read(metadata).decode()
