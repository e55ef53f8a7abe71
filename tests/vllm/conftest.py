"""Fixtures for tests on real engines. They run in the environment of `make test-vllm` only."""

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.guarantees import harness
from tests.vllm import engines
from tests.vllm.models import MODELS

NURSERY = pytest.StashKey[engines.Nursery]()

#: Of a test, in waits that are as long as any may be: a wait that is too long says what it was for.
TIMEOUT_WAITS = 3


def pytest_configure() -> None:
    if find_spec("vllm") is None or find_spec("vllm_omni") is None:
        pytest.exit(f"{sys.executable} has no vLLM: run `make test-vllm`", returncode=1)


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
    folder = tmp_path_factory.mktemp("models")
    nursery.call("tests.vllm.models:write_all", str(folder))
    return folder


@pytest.fixture
def scene(models: Path, nursery: engines.Nursery) -> Iterator[engines.Scene]:
    """Daemons and engines of one test; ends them, and checks the daemons."""
    with engines.scene(models, nursery) as made:
        yield made


@pytest.fixture(scope="session")
def expected(models: Path, nursery: engines.Nursery) -> Mapping[str, list[list[list[int]]]]:
    """What plain vLLM answers to each of `REQUESTS`, by model."""
    with engines.scene(models, nursery) as made:
        return {
            engine.label: [engine.generate(prompts, engines.TOKENS) for prompts in engines.REQUESTS]
            for engine in made.plain(*MODELS)
        }
