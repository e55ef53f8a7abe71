"""Prints the GPU as JSON: `python -m benchmarks.gpu_check.identify cuda:0`."""

import hashlib
import json
import platform
import subprocess
import sys
from typing import Any

from benchmarks.gpu_check.settings import ROOT, Settings
from swapd import __version__


def identify(device: str) -> dict[str, Any]:
    """The GPU's name, its driver and the source tree's version, or an `error`."""
    try:
        from swapd.device import DeviceError
        from swapd.device.driver import Driver
    except ImportError as exc:
        return {"error": f"{exc}; pip install 'swapd[cuda,torch]'"}
    try:
        driver = Driver(Settings(device=device).index)
        version = driver.call(driver.api.cuDriverGetVersion)
    except DeviceError as exc:
        return {"error": str(exc)}
    stub = driver.product.startswith("Fake GPU")
    said = {
        "gpu": driver.product,
        "uuid": driver.uuid,
        "driver": f"for CUDA {version // 1000}.{version % 1000 // 10}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit() or _sources(),
        "stub": stub,
    }
    driver.close()
    return said


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _sources() -> str:
    """The version of a tree unknown to git, such as a copied one."""
    digest = hashlib.sha256()
    for package in ("swapd", "client", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{__version__}, sources {digest.hexdigest()[:12]}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(identify(sys.argv[1])))
