"""Models and features of vLLM, a row each: the same answers, to the last bit, under evictions.

Each row's engine and one without swapd get the same requests. Another session takes the device
from the one on swapd before each request and in its middle: a read outside a lease is a fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from swapd_client.weights import safetensors
from tests.guarantees.harness import Daemon
from tests.once import made_once
from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import (
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    await_leases_back,
    on_swapd,
    plain,
)
from tests.vllm.environment import ROOT
from tests.vllm.zoo import AUDIO, BEGIN, END, IMAGE

DRIVEN: Any = {DRIVES: "tests.vllm.asked:Asked"}
#: vLLM compiles small functions of its own even in eager mode, and each takes seconds.
NOT_COMPILED: Any = {"TORCHDYNAMO_DISABLE": "1"}

Requests = Sequence[Mapping[str, Any]]

BUDGET = "16MiB"
#: Its weights leave in the middle of a request, too.
AT_ONCE = {"finish_within_s": 0}
#: And every second layer comes and goes inside each step.
STREAMED = {**AT_ONCE, "component": "streamed", "offload_group_size": 2}

TEXT: Requests = ({"prompt": [40, 41, 42, 43]}, {"prompt": [50, 51]})


@dataclass(frozen=True)
class Row:
    """One engine and its requests."""

    name: str
    #: One of `zoo.CHECKPOINTS`.
    checkpoint: str
    #: Sets of requests; the requests of one set are open together.
    asked: Sequence[Requests] = (TEXT,)
    #: The engine's arguments. "zoo:NAME" is the folder of a checkpoint.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The least share of the checkpoint in swapd.
    held: float = 0.95
    #: A counter of vLLM's that shows that the feature was used.
    counts: str = ""


def pooled(task: str) -> Sequence[Requests]:
    prompts = ([40, 41, 42], [50, 51], list(range(60, 90)))
    return [[{"prompt": prompt, "pool": task}] for prompt in prompts]


PICTURES = tuple(
    ({"prompt": [40, BEGIN, IMAGE, END, 41], "picture": colour},)
    for colour in ([250, 20, 10], [10, 30, 240])
)
SOUNDS = tuple(
    ({"prompt": [40, BEGIN, AUDIO, END, 41], "sound": pitch},) for pitch in (440.0, 4000.0)
)
WITH_TOKENIZER = {"skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256"}
POOLS = {"runner": "pooling"}
EMBEDS = {**POOLS, "convert": "embed", "skip_tokenizer_init": False}
COUNTED = {"disable_log_stats": False}
REPEATED = [{"prompt": [40, 41, 42, 43] * 4}, {"prompt": [50, 51, 50, 51, 50]}]
#: Longer than a block of the KV cache.
LONG = [[{"prompt": [*range(40, 190), last]}] for last in (5, 6)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
JSON = [{"prompt": [40, 41], "json": SCHEMA, "tokens": 40}]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
SPECULATES = {**COUNTED, "speculative_config": {**NGRAM, "prompt_lookup_min": 1}}
#: More than one needs kernels that vLLM's CPU build lacks.
DRAFT = {"method": "draft_model", "model": "zoo:llama", "num_speculative_tokens": 1}
EAGLE = {"method": "eagle", "model": "zoo:llama-eagle", "num_speculative_tokens": 1}
DRAFTED = "vllm:spec_decode_num_draft_tokens"


ROWS = (
    Row("Llama", "llama"),
    Row("Qwen3", "qwen3"),
    Row("Qwen3-MoE", "qwen3-moe"),
    Row("Gemma 2", "gemma2"),
    Row("Gemma 3", "gemma3"),
    Row("OPT", "opt"),
    Row("DeepSeek-V2", "deepseek"),
    Row("AWQ", "llama-awq"),
    Row("GPTQ", "llama-gptq"),
    Row("Qwen2-VL", "qwen2-vl", (*PICTURES, TEXT), WITH_TOKENIZER),
    Row("Qwen2-Audio", "qwen2-audio", (*SOUNDS, TEXT), WITH_TOKENIZER),
    Row("BERT, embeddings", "bert", pooled("embed"), EMBEDS),
    Row("BERT, classifier", "bert-classifies", pooled("classify"), POOLS),
    Row("Qwen3, embeddings", "qwen3", pooled("embed"), EMBEDS),
    Row("Qwen3, classifier", "qwen3-classifies", pooled("classify"), POOLS),
    Row("ngram speculation", "llama", (REPEATED,), SPECULATES, counts=DRAFTED),
    Row("draft model", "llama", (TEXT,), {**COUNTED, "speculative_config": DRAFT}, counts=DRAFTED),
    Row("EAGLE", "llama", (TEXT,), {**COUNTED, "speculative_config": EAGLE}, counts=DRAFTED),
    Row("prefix caching", "llama", LONG, COUNTED, counts="vllm:prefix_cache_hits"),
    Row("chunked prefill", "llama", LONG, {"max_num_batched_tokens": 32}),
    Row("structured outputs", "words", (JSON,), {"skip_tokenizer_init": False}),
    Row("torch.compile", "llama-short", (TEXT,), {"enforce_eager": False}),
)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A folder of the checkpoints, by name."""

    def write(path: Path) -> None:
        nursery.call("tests.vllm.zoo:write_all", str(path))

    return made_once(tmp_path_factory, "zoo", write)


class Evictor:
    """Takes the whole device, and gives it back."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._client = swapd_client.connect(daemon.folder, label="evictor")

    def evict(self) -> None:
        """Blocks until no component is resident."""
        with self._client.acquire_workspace(BUDGET):
            pass

    def close(self) -> None:
        self._client.close()


def begun(scene: Scene, label: str, arguments: Mapping[str, object]) -> Engine:
    eager: Any = NOT_COMPILED if arguments["enforce_eager"] else {}
    engine = scene.process(label, **DRIVEN, **eager)
    engine.begin("start", **arguments)
    return engine


def in_folder(zoo: Path, given: Any) -> Any:
    """`given`, with the folders of checkpoints for their names."""
    if isinstance(given, Mapping):
        return {name: in_folder(zoo, one) for name, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [in_folder(zoo, one) for one in given]
    return str(zoo / given[4:]) if isinstance(given, str) and given.startswith("zoo:") else given


def answers(engine: Engine, asked: Requests) -> Any:
    engine.put(asked)
    engine.go(1000)
    return engine.answers()


def why_not(engine: Engine, asked: Requests) -> str | None:
    """The reason why an engine does not answer; None if it does."""
    try:
        answers(engine, asked)
    except EngineFailed as exc:
        return f"{exc.kind}: {exc.message}"
    return None


def answers_under_evictions(engine: Engine, asked: Requests, evictor: Evictor) -> Any:
    evictor.evict()
    engine.put(asked)
    while engine.go(3):
        evictor.evict()
    return engine.answers()


def nbytes_of(checkpoint: Path) -> int:
    with safetensors.open_all(checkpoint) as tensors:
        return sum(one.nbytes for one in tensors.values())


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_it_answers_the_same_when_its_weights_come_and_go(
    nursery: Nursery, zoo: Path, row: Row
) -> None:
    checkpoint = zoo / row.checkpoint
    arguments, asked = in_folder(zoo, row.arguments), in_folder(zoo, row.asked)
    with engines.scene(zoo, nursery) as scene:
        daemon = scene.daemon(budget=BUDGET, residency_factor=0)
        without = begun(scene, "plain", plain(checkpoint, **arguments))
        eager = arguments.get("enforce_eager", True)
        if not eager:  # the next one then finds the code in torch's cache
            without.result()
        engine = begun(scene, "swapd", on_swapd(checkpoint, daemon.folder, AT_ONCE, **arguments))
        streamed = begun(
            scene, "streamed", on_swapd(checkpoint, daemon.folder, STREAMED, **arguments)
        )
        if eager:
            without.result()
        engine.result()
        if not eager:
            with pytest.raises(EngineFailed, match="enforce_eager: true"):
                streamed.result()
            streamed = engine
        else:
            streamed.result()
            names = [one.name for one in daemon.status().components]
            assert any(name.startswith("streamed.streamed/") for name in names)
        if (problem := why_not(without, asked[0])) is not None:
            assert why_not(engine, asked[0]) == problem, "vLLM has no kernels for it on this CPU"
            return
        mine = [c for c in daemon.status().components if not c.name.startswith("streamed")]
        held = sum(one.nbytes for one in mine)
        assert held >= row.held * nbytes_of(checkpoint)
        evictor = Evictor(daemon)
        expected = [answers(without, requests) for requests in asked]
        got = [answers_under_evictions(engine, requests, evictor) for requests in asked]
        assert got == expected
        assert [answers_under_evictions(streamed, one, evictor) for one in asked] == expected
        if row.counts:
            assert engine.counters()[row.counts] > 0
        assert answers(engine, asked[0]) == expected[0], "and where nobody takes it away"
        evictor.evict()  # the client releases the lease that it keeps
        await_leases_back(daemon)
        status = daemon.status()
        evictor.close()
        assert status.evictions >= len(asked)
        assert status.bytes_out == 0


@pytest.mark.parametrize("settings", [AT_ONCE, STREAMED], ids=["whole", "streamed"])
def test_adapters_come_and_go_while_the_weights_do(
    nursery: Nursery, zoo: Path, settings: Mapping[str, object]
) -> None:
    """With room for one LoRA among the weights, and two of them in memory."""
    first, second = (str(zoo / name) for name in ("adapter-1", "adapter-2"))
    sets: Sequence[Requests] = [
        TEXT,
        [{**one, "lora": first} for one in TEXT],
        [{**one, "lora": second} for one in TEXT],
        [TEXT[0], {**TEXT[0], "lora": second}],
        [{**one, "lora": first} for one in TEXT],
    ]
    arguments = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
    with engines.scene(zoo, nursery) as scene:
        daemon = scene.daemon(budget=BUDGET, residency_factor=0)
        checkpoint = zoo / "llama"
        without = begun(scene, "plain", plain(checkpoint, **arguments))
        engine = begun(scene, "swapd", on_swapd(checkpoint, daemon.folder, settings, **arguments))
        without.result()
        engine.result()
        evictor = Evictor(daemon)
        expected = [answers(without, requests) for requests in sets]
        assert expected[0] != expected[1] != expected[2] != expected[0]
        assert [answers_under_evictions(engine, one, evictor) for one in sets] == expected
        for adapter in (first, second):
            evictor.evict()
            assert engine.forget(adapter)
        evictor.evict()
        assert engine.adapt(second)
        evictor.evict()
        assert answers_under_evictions(engine, sets[2], evictor) == expected[2]
        assert answers_under_evictions(engine, sets[1], evictor) == expected[1]
        evictor.evict()
        await_leases_back(daemon)
        status = daemon.status()
        evictor.close()
        assert status.evictions >= 2 * len(sets)
        assert status.bytes_out == 0


def test_the_page_says_of_every_row_that_it_was_run() -> None:
    page = (ROOT / "deploy" / "vllm-omni" / "README.md").read_text()
    said = page.partition("## What was run")[2].partition("\n## ")[0]
    assert [row.name for row in ROWS if f"`{row.name}`" not in said] == []
