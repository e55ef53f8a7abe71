"""Three other engines whose KV caches do not fit together: one with LoRAs, one with a grammar, one
with pictures. Each gives plain vLLM's answers, in every way to take turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import (
    MIB,
    Engine,
    Nursery,
    Scene,
    by_component,
    on_swapd,
    plain,
    rounds_until,
)
from tests.vllm.test_kv_lost import names
from tests.vllm.test_zoo import DRIVEN, SCHEMA, in_folder, zoo
from tests.vllm.zoo import BEGIN, END, IMAGE

__all__ = ["zoo"]

#: Of each stage, beside some MiB of weights; and room for one with its cache, and no more.
CACHE = 8 * MIB
BUDGET = "16MiB"
RUNNING_AHEAD = "tests.vllm.running_ahead"
FAILING = "tests.guarantees.failing_saves"

TOKENS = 40
#: Shorter than a request, longer than the daemon's quantum.
SLICE_S = 0.05
#: The shared beginning of several prompts, longer than a block of the cache.
BEGINNING = [*range(40, 180)]
OTHER_SCHEMA = {
    "type": "object",
    "properties": {"b": {"enum": ["red", "blue"]}, "c": {"type": "boolean"}},
    "required": ["b", "c"],
}

Said = dict[str, list[Any]]


def asked(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"prompt": [*BEGINNING, *prompt], "tokens": TOKENS, **more}


def sees(colour: Sequence[int]) -> dict[str, Any]:
    return {**asked([]), "prompt": [*BEGINNING, BEGIN, IMAGE, END, 41], "picture": colour}


#: By the checkpoint of an engine: its arguments, and sets of requests that are open together.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8},
    "words": {"skip_tokenizer_init": False},
    "qwen2-vl": {"skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256"},
}
SETS: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]] = {
    "llama": [
        [asked([5]), asked([6, 7])],
        [asked([5], lora="zoo:adapter-1"), asked([6, 7], lora="zoo:adapter-1")],
        [asked([5], lora="zoo:adapter-2"), asked([6, 7])],
        [asked([5], lora="zoo:adapter-1")],
    ],
    "words": [
        [asked([5], json=SCHEMA), asked([6], json=OTHER_SCHEMA)],
        [asked([5], json=OTHER_SCHEMA), asked([6, 7])],
    ],
    "qwen2-vl": [
        [sees([250, 20, 10]), asked([5])],
        [sees([10, 30, 240]), sees([250, 20, 10])],
    ],
}


class Mode(NamedTuple):
    """A way to take turns."""

    name: str
    #: Options of the plugin.
    settings: Mapping[str, Any]
    prefixes: bool = False
    #: Each engine's core has a process of its own.
    apart: bool = False
    #: Options of the engines.
    arguments: Mapping[str, Any] = {}
    #: A step is scheduled while another runs, as vLLM does it on GPUs (`running_ahead.py`).
    ahead: bool = False
    #: A daemon that fails every third save.
    failing: bool = False


SLICED = {"kv": "auto", "slice_s": SLICE_S}
HEARS = {"scheduler_cls": "swapd_client.vllm.scheduler.Scheduler"}
MODES = (
    Mode("drop", {"kv": "drop"}, apart=True),
    Mode("drop, prefixes", {"kv": "drop"}, prefixes=True, apart=True, arguments=HEARS),
    Mode("drop, async scheduling", {"kv": "drop"}, apart=True, ahead=True),
    Mode("save, prefixes", {"kv": "save"}, prefixes=True),
    Mode("sliced", SLICED),
    Mode("sliced, prefixes", SLICED, prefixes=True),
    Mode("sliced, a process for the core", SLICED, apart=True),
    Mode("sliced, prefixes, saves fail", SLICED, prefixes=True, failing=True),
    Mode("auto, prefixes, async scheduling", {"kv": "auto"}, prefixes=True, ahead=True),
    Mode("sliced, async scheduling, saves fail", SLICED, ahead=True, failing=True),
)


def one_by_one(mode: Mode) -> bool:
    """If batches depend on timing, or parts are computed again in other batches, the last bits of
    sums vary. Then each engine gets one request at a time, in float32."""
    return mode.apart or mode.failing


def arguments_of(mode: Mode) -> dict[str, Any]:
    exact = {"dtype": "float32"} if one_by_one(mode) else {}
    cache = {"kv_cache_memory_bytes": CACHE, "enable_prefix_caching": mode.prefixes}
    return {"max_model_len": 512, **cache, **exact}


def begun(scene: Scene, mode: Mode, name: str, arguments: Mapping[str, Any]) -> Engine:
    engine = scene.process(name, multiprocessing=mode.apart, **DRIVEN)
    engine.fork_workers()  # a spawned one has no stand-ins for packages
    if mode.ahead:
        engine.imports(RUNNING_AHEAD)
    engine.begin("start", **arguments, async_scheduling=mode.ahead)
    return engine


def answer(mode: Mode, zoo: Path, started: Mapping[str, Engine]) -> Said:
    """The answers of all, asked at once. Without likelihoods if last bits may differ."""
    for name, engine in started.items():
        sets = in_folder(zoo, SETS[name])
        if one_by_one(mode):
            sets = [[one] for requests in sets for one in requests]
        engine.begin("answer", sets)
        engine.begin("forget_prefixes")
    said = {name: engine.result() for name, engine in started.items()}
    for engine in started.values():
        engine.result()
    if one_by_one(mode):
        return {name: [[one[:2] for one in few] for few in sets] for name, sets in said.items()}
    return said


@pytest.fixture(scope="module")
def known() -> dict[Any, Said]:
    """The answers of plain vLLM, once it was asked."""
    return {}


@pytest.fixture
def expected(zoo: Path, nursery: Nursery, known: dict[Any, Said], mode: Mode) -> Said:
    alike = mode._replace(apart=False)
    if one_by_one(mode):  # the same tokens, even if computed otherwise
        alike = alike._replace(prefixes=False, ahead=False)
    key = alike.prefixes, alike.ahead, one_by_one(mode)
    if key not in known:
        options = {**arguments_of(mode), "enable_prefix_caching": alike.prefixes}
        with engines.scene(zoo, nursery) as scene:
            started = {
                name: begun(scene, alike, name, plain(zoo / name, **more, **options))
                for name, more in ARGUMENTS.items()
            }
            for engine in started.values():
                engine.result()
            known[key] = answer(mode, zoo, started)
    return known[key]


@pytest.fixture
def place(zoo: Path, nursery: Nursery) -> Iterator[Scene]:
    with engines.scene(zoo, nursery) as made:
        yield made


def daemon_for(place: Scene, mode: Mode) -> Daemon:
    more: dict[str, Any] = {"program": FAILING} if mode.failing else {}
    quantum = SLICE_S / 10
    return place.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=quantum, **more)


@pytest.mark.parametrize("mode", [pytest.param(mode, id=mode.name) for mode in MODES])
def test_loras_grammars_and_pictures_go_with_caches_that_take_turns(
    place: Scene, zoo: Path, mode: Mode, expected: Said
) -> None:
    daemon = daemon_for(place, mode)
    of_mode = {**arguments_of(mode), **mode.arguments}
    started = {
        name: begun(
            place, mode, name, on_swapd(zoo / name, daemon.folder, mode.settings, **more, **of_mode)
        )
        for name, more in ARGUMENTS.items()
    }
    for engine in started.values():
        engine.result()
    assert {*by_component(daemon)} == {n for name in ARGUMENTS for n in (name, f"{name}.kv")}
    if not mode.apart:
        assert [engine.runs_ahead() for engine in started.values()] == [mode.ahead] * 3
    caches = {f"{name}.kv" for name in ARGUMENTS}

    def seen() -> bool:
        """The clock decides which of them are interrupted."""
        saved = names(daemon, "CopyOut")
        return (
            names(daemon, "Evicted") >= caches
            and (saved == caches or not (mode.prefixes and mode.settings["kv"] != "drop"))
            and (saved != set() or "slice_s" not in mode.settings)
            and (names(daemon, "Lost") != set() or not mode.failing)
        )

    for _ in rounds_until(seen, "all caches left as this way of taking turns has them leave"):
        assert answer(mode, zoo, started) == expected
    status = daemon.status()
    assert status.peak_bytes <= status.budget_bytes
    assert sum(one.nbytes for one in status.components) > status.budget_bytes
    assert names(daemon, "CopyOut") <= caches
    assert names(daemon, "Lost") <= caches
    if mode.settings["kv"] == "drop":
        assert status.bytes_out == 0
