"""Settings of a run, and the sizes that fit. Stdlib only."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Settings:
    """Passed to every section. Sizes are bytes, and upper bounds: cards may be smaller."""

    device: str = "cuda:0"
    #: On the fake driver of tests/fakecuda: no kernels, and torch on the CPU stands in.
    stub: bool = False
    #: Repetitions of a timed pair, and swap cycles of the search for leaks.
    rounds: int = 15
    cycles: int = 500
    #: One component of the bounds, of the eviction bound, and of the guarantees.
    swap_bytes: int = 2 * GIB
    evict_bytes: int = 8 * GIB
    model_bytes: int = 256 * MIB
    #: The model whose layers stream.
    attached_bytes: int = 6 * GIB
    #: All three stages of the real model; below some GiB they are tiny. Four ways with 8 GiB take
    #: two to three minutes on an H200; with 16 GiB two of them took that long.
    pipeline_bytes: int = 8 * GIB
    #: Requests of each way, after some that do not count.
    requests: int = 2
    #: Bytes that the raw probe copies and pins.
    probe_bytes: int = GIB
    #: The daemons' chunk.
    chunk_bytes: int = 64 * MIB
    #: Seconds of one step of the decode loop, and steps of a block.
    step_s: float = 0.005
    steps: int = 100
    #: A pytest expression to run a part of the contract suite only.
    contract: str = ""

    @property
    def index(self) -> int:
        """The GPU's number, for torch and the driver."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def on_host(self) -> bool:
        """On swapd's host device, which sections without a driver use in tests."""
        return self.device == "host"

    @property
    def on_cpu(self) -> bool:
        """Whether torch computes on the CPU."""
        return self.stub or self.on_host

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Settings":
        return cls(**json.loads(text))


#: Everything tiny: to run every line in a minute on the fake driver.
SMALL = Settings(
    rounds=3,
    cycles=20,
    swap_bytes=16 * MIB,
    evict_bytes=32 * MIB,
    model_bytes=8 * MIB,
    attached_bytes=32 * MIB,
    pipeline_bytes=0,
    requests=2,
    probe_bytes=16 * MIB,
    chunk_bytes=2 * MIB,
    step_s=0.002,
    steps=10,
    contract="test_no_bytes_are_a_copy_too",
)


def host_available() -> int:
    """Free bytes of host memory for host copies and pinned buffers."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return 0


def fitting(wanted: int, unit: int, *, device_free: int, host_copies: float, of: float) -> int:
    """`wanted` bytes, or fewer: `of` must fit on the device at once, `host_copies` in host memory.

    A multiple of `unit`, and one at least.
    """
    rooms = [wanted, int(device_free * 0.9 / of)]
    if host_copies:
        rooms.append(int(host_available() * 0.7 / host_copies))
    return max(min(rooms) // unit, 1) * unit


#: In the order of a request.
STAGES = ("thinker", "talker", "token2wav")

#: Tokens of a request's text.
PROMPT = 32


def prompt(number: int) -> list[int]:
    """The text of a request."""
    return random.Random(number).choices(range(1000), k=PROMPT)
