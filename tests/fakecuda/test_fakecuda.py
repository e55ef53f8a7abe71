"""The fake driver keeps the driver's contract, seen through the real cuda-bindings."""

from pathlib import Path

import pytest

from tests import fakecuda
from tests.processes import output_of


def test_a_process_finds_the_fake_driver_through_its_environment() -> None:
    with fakecuda.machine(devices=3) as fake:
        program = """
            from cuda.bindings import driver
            assert driver.cuInit(0)[0] == 0
            print(driver.cuDeviceGetCount()[1])
        """
        assert output_of(program, env=fake.environment()) == "3\n"


def test_without_gcc_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install gcc"):
        fakecuda.build(tmp_path)
