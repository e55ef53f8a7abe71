"""A transformers model whose layers stream, by `attach`: the same tokens, and the time of a step.

In this process. The same model is resident, attached with half of its layers on the host, and given
to accelerate with the same half there. A step of a streamed model cannot be faster than the copy of
the bytes that do not stay: the rows are over that.
"""

import importlib.util
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check import torchish
from benchmarks.gpu_check.raw import Gpu, median_s, pinned, seconds
from benchmarks.gpu_check.rig import chunks_of, room_for, serving, watching
from benchmarks.gpu_check.rows import Check, spread
from benchmarks.gpu_check.settings import GIB, Settings
from swapd.bench import swap_in

LAYERS = 16
TOKENS = 8
STEP_AT_MOST = 1.15

#: The tokens of a prompt's answer, and the scores of the last.
Answer = tuple[list[int], torch.Tensor]


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    torchish.start(settings)
    if settings.stub:  # torch cannot compute there
        settings = replace(settings, device="host")
    nbytes = room_for(settings, settings.attached_bytes, of=3, host_copies=3)
    model = _model(settings, nbytes)
    weights = sum(p.nbytes for p in model.parameters())
    away = sum(p.nbytes for p in model.model.layers.parameters()) // 2
    expected = _answer(settings, model)
    resident_s = statistics.median(_steps(settings, model))
    model.cpu()
    copy_s = _copy_s(settings, away)
    check.row("a step, everything resident", resident_s * 1e3, "ms", f"{weights / GIB:.3g} GiB")
    with check.part("attach", guarantee=True):
        _attached(check, settings, model, away, copy_s, resident_s, expected)
    if importlib.util.find_spec("accelerate") is not None and not settings.on_cpu:
        with check.part("accelerate"):
            took = statistics.median(_accelerate(settings, model))
            name = "a step: accelerate, half of the layers on the host, over the copy"
            check.row(name, took / max(copy_s, resident_s))


def _attached(
    check: Check,
    settings: Settings,
    model: Any,
    away: int,
    copy_s: float,
    resident_s: float,
    expected: Answer,
) -> None:
    weights = sum(p.nbytes for p in model.parameters())
    with (
        serving(settings, chunks_of(weights, settings) + 64 * settings.chunk_bytes) as daemon,
        watching(daemon) as client,
    ):
        took = seconds(partial(client.attach, model, ".", resident=weights - away))
        check.row("attach", took / (weights / GIB), "s/GiB", "from ordinary memory")
        tokens, scores = _answer(settings, model)
        same = tokens == expected[0] and torch.equal(scores, expected[1])
        check.holds("half of the layers stream: the same scores, bit for bit", same)
        swap_in.until_pinned(client, weights, partial(_answer, settings, model))
        steps = _steps(settings, model)
        note = f"ms: {spread(steps, 1e3)}; the copy alone {copy_s * 1e3:.4g}"
        name = "a step: attach, half of the layers on the host, over the copy"
        ratio = statistics.median(steps) / max(copy_s, resident_s)
        check.slower(name, ratio, STEP_AT_MOST, "", note)
        before = client.status()
        _answer(settings, model)
        after = client.status()
        name = "bytes in, over those that do not stay"
        check.row(name, (after.bytes_in - before.bytes_in) / TOKENS / away)
        check.at_most("bytes copied back", after.bytes_out, 0)


# --- the model ---------------------------------------------------------------------------


def _model(settings: Settings, nbytes: int) -> Any:
    """A Llama of about `nbytes` where torch computes, with random weights."""
    import transformers

    dtype = torch.float32 if settings.stub else torch.bfloat16
    # a layer has 4 matrices of width times width, and 3 of width times 3 widths
    width = max(int((nbytes / LAYERS / dtype.itemsize / 13) ** 0.5) // 128 * 128, 128)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=256,
    )
    torch.manual_seed(5)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(torchish.device_of(settings)):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(kept)
    return model.eval().requires_grad_(requires_grad=False)


def _answer(settings: Settings, model: Any) -> Answer:
    """Greedy, without a cache of keys: each step is a whole pass."""
    tokens = list(range(40, 56))
    with torch.no_grad():
        for _ in range(TOKENS):
            scores = model(_ids(settings, tokens), use_cache=False).logits[0, -1]
            tokens.append(int(scores.argmax()))
    return tokens, scores.cpu()


def _ids(settings: Settings, tokens: list[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=torchish.device_of(settings))


def _steps(settings: Settings, model: Any) -> list[float]:
    """Seconds of each of some passes, one after the other."""
    ids = _ids(settings, list(range(40, 56)))

    def step() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)
        torchish.synchronize(settings)

    step()
    return [seconds(step) for _ in range(settings.rounds)]


def _accelerate(settings: Settings, model: Any) -> list[float]:
    """Every other layer on the host, as swapd spreads them. The model stays that way."""
    import accelerate

    model.cpu()  # what it calls the host is where the weights are
    places: dict[str, int | str] = {
        name: settings.index
        for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    }
    for number in range(LAYERS):
        places[f"model.layers.{number}"] = "cpu" if number % 2 else settings.index
    accelerate.dispatch_model(model, places)
    return _steps(settings, model)


def _copy_s(settings: Settings, nbytes: int) -> float:
    """Seconds of one copy of as many bytes from pinned memory."""
    gpu = Gpu(settings)
    target = gpu.alloc(nbytes)
    try:
        with pinned(gpu, nbytes) as host:
            # no copy crosses the end of what was pinned in one call
            return median_s(partial(gpu.copy_in, target, host, nbytes, GIB), 5)
    finally:
        gpu.dealloc(target)
