"""Fixtures for tests on real engines. They run in the environment of `make test-vllm` only."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm import engines
from tests.vllm.environment import environment
from tests.vllm.models import MODELS

#: Engines take seconds to start, and several start at once.
TIMEOUT_S = 400


def pytest_configure() -> None:
    if find_spec("vllm") is None or find_spec("vllm_omni") is None:
        pytest.exit(f"{sys.executable} has no vLLM: run `make test-vllm`", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny checkpoints, by name."""
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "tests.vllm.models", str(folder)]
    subprocess.run(command, env=environment(), check=True)
    return folder


@pytest.fixture(scope="session")
def nursery() -> Iterator[engines.Nursery]:
    """Forks processes that have imported vLLM already."""
    made = engines.Nursery()
    yield made
    made.close()


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
