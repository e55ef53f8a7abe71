"""The environment itself: without it the other tests would prove nothing."""

import subprocess
import sys

from tests.vllm.environment import environment


def test_the_versions_are_those_that_swapd_supports_and_can_be_imported() -> None:
    program = "import vllm, vllm_omni, torchvision; print(vllm.__version__, vllm_omni.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["0.30.0", "0.30.0"]
