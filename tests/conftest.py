"""Fixtures that several folders of tests share."""

import gc
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest._code.code import TracebackEntry

from swapd import spawn
from swapd_client import Client, connect
from tests import fakecuda, forked
from tests.guarantees import harness
from tests.once import made_once
from tests.processes import PYTHONPATH

HERE = Path(__file__).parent
#: A first collection comes after so many new objects; by default, after 700.
COLLECTED_AFTER = 10_000
#: So many new modules have enough objects for a collection to be slow.
MANY_MODULES = 100

#: The file of the last test, and the number of modules when their objects were last excluded.
_FROZEN = pytest.StashKey[tuple[Path | None, int]]()

# an interrupt may come at an instruction of no line: pytest could not print such a failure
TracebackEntry.lineno = property(  # type: ignore[assignment]
    lambda entry: (entry._rawentry.tb_lineno or entry.frame.code.raw.co_firstlineno) - 1
)

if find_spec("hypothesis") is not None:  # tests of real engines run without it
    import_module("tests.examples")


def pytest_configure() -> None:
    """Let the tests' processes get SIGINT and SIGHUP: background jobs of a shell, and those under
    nohup, would pass on that they ignore them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Switch garbage collection off during the imports: nothing imported is garbage."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_share(config: pytest.Config) -> None:
    """Have each worker of a whole run begin with other files: in a new clone they compile all
    files, and each finds the files that the others have compiled.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(path.relative_to(config.rootpath) for path in HERE.rglob("test_*.py"))
    for path in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
        if "vllm" not in path.parts:
            with suppress(Exception, pytest.skip.Exception):  # the collection reports it
                import_module(".".join(path.with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that none runs alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the imported objects from collections, so that these visit objects of tests only.

    And collect less often than by default, which suits programs with fewer objects.
    """
    gc.set_threshold(COLLECTED_AFTER)
    session.stash[_FROZEN] = None, _freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude the objects of late imports, such as transformers, too, before the next file."""
    path, modules = item.session.stash[_FROZEN]
    if path != item.path and len(sys.modules) > modules + MANY_MODULES:
        modules = _freeze()
    item.session.stash[_FROZEN] = item.path, modules


def _freeze() -> int:
    """Returns the number of modules whose objects are excluded."""
    gc.collect()
    gc.freeze()
    return len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def _daemons_are_forked() -> Iterator[None]:
    """Daemons of `spawn.daemon` start quickly, too: from the process that forks the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        names = {**vars(subprocess), "Popen": forked.Popen}
        patch.setattr(spawn, "subprocess", types.SimpleNamespace(**names))
        yield


@pytest.fixture(autouse=True, scope="session")
def _what_is_in_c_is_built_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For all workers, when the first of them needs it."""

    @cache
    def driver() -> Path:
        return made_once(tmp_path_factory, "fakecuda", fakecuda.build)

    @cache
    def aside() -> tuple[Path, ...]:
        has_compiler = shutil.which("cc") is not None
        return (made_once(tmp_path_factory, "aside.so", forked.build),) if has_compiler else ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakecuda, "built", driver)
        patch.setattr(forked, "library", aside)
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, since sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    """A strict daemon, for tests that need no other."""
    with spawn.daemon(budget="64MiB", isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: spawn.Spawned) -> Iterator[Client]:
    with connect(daemon.folder) as client:
        yield client


@pytest.fixture
def imported() -> tuple[str, ...]:
    """The modules that the workers of `world` import in advance: "torch" in files with tensors."""
    return ()


@pytest.fixture
def world(imported: tuple[str, ...]) -> Iterator[harness.World]:
    """Daemons and workers in processes of their own; ends them, and checks the daemons."""
    with harness.world(imported=imported) as made:
        yield made
