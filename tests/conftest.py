"""Fixtures that several folders of tests share."""

import gc
import signal
import subprocess
import types
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from swapd import spawn
from tests import fakecuda, forked
from tests.guarantees import harness
from tests.once import made_once
from tests.processes import PYTHONPATH

HERE = Path(__file__).parent

if find_spec("hypothesis") is not None:  # where real engines are tested it is not there
    import_module("tests.examples")


def pytest_configure() -> None:
    """Have processes that tests start hear Ctrl-C, and that a terminal has gone: a shell's
    background jobs, and those under nohup, pass on that they do not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect nothing as garbage until all is imported: nothing of that is."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_share(config: pytest.Config) -> None:
    """Have each worker of a whole run begin with other files: in a new clone all are compiled, and
    what one has compiled the others find."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(path.relative_to(config.rootpath) for path in HERE.rglob("test_*.py"))
    for path in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
        if "vllm" not in path.parts:
            with suppress(Exception, pytest.skip.Exception):  # said when it is collected
                import_module(".".join(path.with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: else others wait for one in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Have what tests collect looked for among their own objects, not in all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _daemons_are_forked() -> Iterator[None]:
    """Those of `spawn.daemon` start quickly too, from the process that forks the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        names = {**vars(subprocess), "Popen": forked.Popen}
        patch.setattr(spawn, "subprocess", types.SimpleNamespace(**names))
        yield


@pytest.fixture(autouse=True, scope="session")
def _the_fake_driver_is_built_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For all workers, when the first of them needs it."""

    @cache
    def built() -> Path:
        return made_once(tmp_path_factory, "fakecuda", fakecuda.build)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakecuda, "built", built)
        yield


@pytest.fixture
def imported() -> tuple[str, ...]:
    """What the workers of `world` have imported: files whose workers have tensors say torch."""
    return ()


@pytest.fixture
def world(imported: tuple[str, ...]) -> Iterator[harness.World]:
    """Daemons and workers in processes of their own; ends them, and checks the daemons."""
    with harness.world(imported=imported) as made:
        yield made
