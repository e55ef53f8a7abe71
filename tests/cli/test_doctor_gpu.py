"""`swapd doctor` on a machine with GPUs, which a driver stub plays."""

import json
from pathlib import Path
from typing import Any

from swapd.doctor import Check, host
from tests import fakecuda
from tests.processes import output_of

MIB = 1 << 20

EXAMINE = "import json, msgspec\nfrom swapd.doctor import host\n"
EXAMINE += "print(json.dumps(msgspec.to_builtins(host.gpus())))"


def examined(**knobs: object) -> list[dict[str, Any]]:
    with fakecuda.machine(**knobs) as fake:
        found: list[dict[str, Any]] = json.loads(output_of(EXAMINE, env=fake.environment()))
    return found


def named(checks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [check for check in checks if check["name"] == name]


def test_without_a_gpu_nothing_is_missing() -> None:
    assert host.no_driver([], "no driver").status == "ok"


def test_a_gpu_that_cannot_be_used_says_why() -> None:
    check = host.no_driver([Path("/dev/nvidia0")], "the driver is too old")
    assert (check.status, check.advice) == ("warn", "the driver is too old")


def test_each_gpu_is_named_with_its_memory() -> None:
    checks = examined(devices=2, total=256 * MIB)
    first, second = named(checks, "cuda:0")[0], named(checks, "cuda:1")[0]
    assert first["status"] == second["status"] == "ok"
    assert "256 MiB" in first["found"]
    assert "swapd serve --device cuda:1" in second["advice"]
    assert "make gpu-check" in second["advice"]


def test_too_few_descriptors_for_the_chunks_of_the_gpu() -> None:
    assert host.descriptors(80 << 30, 4096).status == "ok"
    check = host.descriptors(80 << 30, 1024)
    assert check == Check(
        "gpu descriptors",
        "warn",
        "1024 at most; the whole GPU in chunks of 64 MiB takes 1536",
        "set `ulimit -n 1536` (LimitNOFILE in a unit), or use a larger --chunk",
    )
