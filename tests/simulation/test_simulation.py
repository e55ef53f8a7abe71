"""No seed breaks a promise, a seed is one story in every process, and a broken promise is found."""

import subprocess
import sys
from pathlib import Path

import pytest

from swapd.shared.config import environment_with

ROOT = Path(__file__).parents[2]
#: Seeds of one test; `make simulate` plays 10,000.
SEEDS = 75
MAIN = "import sys; from tests.simulation.__main__ import main; sys.exit(main())"
#: The daemon does not hear of the end of some slow actions.
FORGETFUL = """
from swapd.daemon.dispatch import Dispatch
post = Dispatch.post
Dispatch.post = lambda self, event: type(event).__name__ == "LOST" or post(self, event)
"""

pytestmark = pytest.mark.timeout(600)


def simulated(*arguments: str, hash_seed: int = 0, changed: str = "", fails: bool = False) -> str:
    command = [sys.executable, "-c", changed + MAIN, *arguments, "--processes", "1"]
    env = environment_with(PYTHONHASHSEED=str(hash_seed))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == fails, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("first", range(0, 2 * SEEDS, SEEDS))
def test_no_seed_breaks_a_promise(first: int) -> None:
    assert "\n0 broken" in simulated("--seeds", f"{first}:{first + SEEDS}")


def test_a_seed_is_the_same_story_in_every_process() -> None:
    one, other = (simulated("--seeds", "500:525", hash_seed=n).splitlines() for n in (1, 2))
    assert "traces" in one[0]
    assert one[0] == other[0]
    told = simulated("--seed", "500", "--name", "all", hash_seed=3)
    assert told == simulated("--seed", "500", "--name", "all", hash_seed=4)


@pytest.mark.parametrize("lost", ["CopyStopped", "HostCopyMade"])
def test_a_lost_event_is_found_and_the_printed_command_replays_it(lost: str) -> None:
    changed = FORGETFUL.replace("LOST", lost)
    problem, command, *_ = simulated("--seeds", "0:50", changed=changed, fails=True).splitlines()
    *_, option, seed = command.split()
    told = simulated(option, seed, changed=changed, fails=True).splitlines()
    assert told[-1] == problem
    assert len(told) > 3, "it tells what happened"
