"""Two servers of vLLM, one of 1.5 times the arena, whose layers stream and who take turns.

Each request goes to the other server, so each turn begins with nothing on the device. Their tokens
are held against those of plain vLLM, and the copied bytes against the plan's figure.
"""

import tempfile
from pathlib import Path

import httpx
from msgspec.structs import replace

from benchmarks.vllm.rows import TOKENS, Row, Section
from swapd.plan import sizes
from swapd.plan.demands import WeightGroup
from swapd_client.offload.settings import OffloadSettings
from swapd_client.vllm.options import Options
from tests.vllm import models as checkpoints
from tests.vllm import servers
from tests.vllm.engines import MIB, Nursery, plain, scene

NAMES = ("thinker", "talker")
#: Two thirds of the first; of the second, five sevenths. In chunks of 2 MiB.
BUDGET = 36 * MIB
CHUNK = 2 * MIB
#: Of each server.
OFFLOAD_GB = 0.03
#: Largest share by which the copied bytes may differ from the plan's figure.
APART = 0.05


def measure(models: Path, nursery: Nursery, requests: int) -> Section:
    """So many requests to each server."""
    prompts = [[5 + number, 6, 7, 8] for number in range(requests)]
    other = failed = 0
    with scene(models, nursery) as made, tempfile.TemporaryDirectory() as folder:
        plainly = {}
        for name in NAMES:
            (engine,) = made.start(plain(models / name))
            plainly[name] = [engine.generate([prompt], TOKENS)[0] for prompt in prompts]
            engine.close()
        servers.write(Path(folder), models)
        daemon = made.daemon(budget=BUDGET)
        with servers.Servers(made.folder, Path(folder), daemon.folder, nursery) as started:
            flags = ("--cpu-offload-gb", str(OFFLOAD_GB))
            both = [started.start(name, *flags) for name in NAMES]
            for server in both:
                server.ready()
            before = daemon.status()
            for number, prompt in enumerate(prompts):
                for server in both:
                    try:
                        said = server.complete(prompt, TOKENS)
                    except (httpx.HTTPError, AssertionError):
                        failed += 1
                    else:
                        other += said != plainly[server.name][number]
            after = daemon.status()
    copied = (after.bytes_in - before.bytes_in) / requests
    planned = sum(_planned(models / name) for name in NAMES)
    each = f"of {requests} to each server"
    beside = f"{copied / MIB:.1f} MiB for one to each; the plan: {planned / MIB:.1f} MiB"
    rows = (
        Row("requests that failed", failed, "at most", 0, each),
        Row("requests with other tokens than those of plain vLLM", other, "at most", 0, each),
        Row("bytes a request over the plan's figure", copied / planned, "at most", 1 + APART),
        Row("the same", copied / planned, "at least", 1 - APART, beside),
        Row("peak of the device over its budget", after.peak_bytes / BUDGET, "at most", 1),
        Row("bytes copied out", after.bytes_out, "at most", 0),
    )
    return Section(rows, {"copied bytes a request": [copied], "planned": [planned]})


def _planned(folder: Path) -> int:
    """The bytes that a request copies: its turn's weights, and each step the layers that stream."""
    (found,) = sizes.of_path(folder)
    layers = checkpoints.MODELS[folder.name].layers
    whole = WeightGroup(folder.name, found.nbytes, found.nbytes, chunk=CHUNK)
    whole = replace(whole, each=layers, each_bytes=found.block_bytes)
    options = Options(offload=OffloadSettings(cpu_offload_gb=OFFLOAD_GB))
    part = whole.streaming(options, BUDGET)
    return part.copied + TOKENS * part.streamed * part.each_bytes
