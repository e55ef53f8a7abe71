"""Real vLLM engines with the plugin: their answers equal plain vLLM's, and the time of requests.

First with Model Runner V2, vLLM's default on GPUs, and with experts computed by Triton: no test has
run either on a GPU. Then three engines answer requests in turn, as the stages of `pipeline` do.
Their weights are vLLM's dummies, which are the same in each process.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.pipeline import RESIDENT, RESTART, SWAPD, Found, requests, rows
from benchmarks.gpu_check.rig import Worker, chunks_of, free_bytes, serving
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import GIB, MIB, STAGES, Settings, host_available, prompt

#: Seconds; most for imports, compilation and graphs.
START_S = 240.0
#: Share of the GPU's free memory, and of the host's, for the weights of all engines.
OF_THE_GPU, OF_THE_HOST = 0.5, 0.6
#: Shares of the stages in that.
SHARES = (0.6, 0.3, 0.1)
SLEEP = "vLLM's sleep and wake, level 1"

SECOND = "Model Runner V2, graphs captured: with the plugin the tokens of plain vLLM"
EXPERTS = "experts by Triton: with the plugin the tokens of plain vLLM"


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
    with check.part(SECOND, guarantee=True):
        same(check, settings, SECOND, dense(settings, 4), graphs, second_runner)
    with check.part(EXPERTS, guarantee=True):
        eager = {"enforce_eager": True, "moe_backend": "triton"}
        same(check, settings, EXPERTS, with_experts(settings), eager, experts_by_triton)
    free = free_bytes(settings)
    wanted = (settings.pipeline_bytes, free * OF_THE_GPU, host_available() * OF_THE_HOST)
    found: dict[str, Found] = {}
    for name, found[name] in ways(check, settings, int(min(wanted))):
        rows(check, f"engines, {name}", found[name], free)
    made = [one.made[0] for one in found.values()]
    if len(made) > 1:
        same_all = all(other == made[0] for other in made)
        check.holds("engines say the same by all ways", same_all, ", ".join(found))


# --- models ------------------------------------------------------------------------------


def dense(settings: Settings, layers: int) -> dict[str, Any]:
    """The configuration of a Qwen2 of so many layers, each of some 450 MiB, or tiny."""
    shape = (256, 512, 4, 2, 1024) if settings.on_cpu else (3584, 18944, 28, 4, 32000)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **dict(zip((*names, "vocab_size"), shape, strict=True)),
    }


def with_experts(settings: Settings) -> dict[str, Any]:
    """The same with eight experts in each layer."""
    hidden = 256 if settings.on_cpu else 2048
    return {
        **dense(settings, 4),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


@contextmanager
def written(config: Mapping[str, Any]) -> Iterator[Path]:
    """A model's folder; vLLM makes its weights."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def second_runner(about: Mapping[str, Any]) -> bool:
    return bool(about["second"])


def experts_by_triton(about: Mapping[str, Any]) -> bool:
    return bool(about["experts"] == "TRITON")


# --- with and without ----------------------------------------------------------------------


def same(
    check: Check,
    settings: Settings,
    name: str,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    wanted: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Two engines on swapd in turns, beside a plain one.

    `wanted`: whether an engine, described by its `Engine.about`, is of the kind that `name` means.
    """
    with written(config) as model:
        with _engine(settings, "plain") as plain:
            nbytes = _ask(plain, "start", str(model), False, **options)
            about = _ask(plain, "about")
            said = [_tokens(plain, number) for number in range(settings.requests)]
        told = f"{about['runner']}; {', '.join(about['methods'])}"
        if not wanted(about):
            check.missing(name, f"vLLM has chosen otherwise: {told}")
            return
        right = loads = 0
        # room for one, with its kernels' other memory; not for two
        with serving(settings, chunks_of(nbytes * 7 // 4, settings)) as daemon:
            stages = [_engine(settings, label, daemon.folder) for label in ("one", "two")]
            with stages[0] as one, stages[1] as two:
                for engine in (one, two):
                    _ask(engine, "start", str(model), True, **options)
                for number, expected in enumerate(said):
                    for engine in (one, two):
                        right += _tokens(engine, number) == expected
                loads = daemon_loads(daemon.folder)
    note = f"{right} of {2 * len(said)} requests, {loads} swaps, {nbytes / GIB:.3g} GiB; {told}"
    check.holds(name, right == 2 * len(said), note)


def daemon_loads(folder: Path) -> int:
    import swapd_client

    with swapd_client.connect(folder, label="gpu-check") as client:
        return int(client.status().loads)


def _tokens(engine: Worker, number: int) -> list[int]:
    said: list[int] = _ask(engine, "turn", prompt(number))["tokens"]
    return said


# --- end to end ----------------------------------------------------------------------------


def ways(check: Check, settings: Settings, nbytes: int, *names: str) -> Iterator[tuple[str, Found]]:
    """Three engines, in each way, or in those of `names`: its name, and its result."""
    runs = {RESIDENT: _kept, SWAPD: _swapd, SLEEP: _sleep, RESTART: _restart}
    with ExitStack() as stack:
        layers = [max(int(share * nbytes / (450 * MIB)), 2) for share in SHARES]
        models = {
            stage: stack.enter_context(written(dense(settings, count)))
            for stage, count in zip(STAGES, layers, strict=True)
        }
        largest = 0
        for name in names or runs:
            with check.part(f"three engines: {name}", guarantee=name == SWAPD):
                found = runs[name](settings, models, largest)
                largest = max([largest, *found.nbytes.values()])
                yield name, found


def _kept(settings: Settings, models: Mapping[str, Path], _: int) -> Found:
    found = Found()
    with _engines(settings, models) as engines:
        for stage, engine in engines.items():
            found.nbytes[stage] = _start(engine, models[stage], plugin=False)
        requests(settings, found, partial(_turn, engines))
    return found


def _swapd(settings: Settings, models: Mapping[str, Path], largest: int) -> Found:
    found = Found()
    with (
        serving(settings, chunks_of(largest, settings)) as daemon,
        _engines(settings, models, daemon.folder) as engines,
    ):
        for stage, engine in engines.items():
            _start(engine, models[stage], plugin=True)
        requests(settings, found, partial(_turn, engines))
    return found


def _sleep(settings: Settings, models: Mapping[str, Path], _: int) -> Found:
    """All but the engine of the current turn are asleep."""
    found = Found()
    with _engines(settings, models) as engines:
        for stage, engine in engines.items():
            _start(engine, models[stage], plugin=False, enable_sleep_mode=True)
            _ask(engine, "asleep")

        def turn(stage: str, tokens: list[int]) -> dict[str, Any]:
            _ask(engines[stage], "awake")
            said = _turn(engines, stage, tokens)
            _ask(engines[stage], "asleep")
            return said

        requests(settings, found, turn)
    return found


def _restart(settings: Settings, models: Mapping[str, Path], _: int) -> Found:
    def turn(stage: str, tokens: list[int]) -> dict[str, Any]:
        with _engine(settings, stage) as engine:
            _start(engine, models[stage], plugin=False)
            return _turn({stage: engine}, stage, tokens)

    found = Found()
    requests(settings, found, turn, warm=False, times=1)
    return found


def _start(engine: Worker, model: Path, *, plugin: bool, **more: object) -> int:
    """Eager: compilation and graphs would be most of a start."""
    return int(_ask(engine, "start", str(model), plugin, enforce_eager=True, **more))


def _turn(engines: Mapping[str, Worker], stage: str, tokens: list[int]) -> dict[str, Any]:
    said: dict[str, Any] = _ask(engines[stage], "turn", [token % 1000 for token in tokens])
    return said


def _engine(settings: Settings, label: str, endpoint: Path = Path("/")) -> Worker:
    return Worker(settings, endpoint, label, module="engine")


@contextmanager
def _engines(
    settings: Settings, models: Mapping[str, Path], endpoint: Path = Path("/")
) -> Iterator[dict[str, Worker]]:
    with ExitStack() as stack:
        yield {stage: stack.enter_context(_engine(settings, stage, endpoint)) for stage in models}


def _ask(worker: Worker, do: str, *arguments: object, **options: object) -> Any:
    worker.tell(do, *arguments, **options)
    return worker.answer(START_S)
