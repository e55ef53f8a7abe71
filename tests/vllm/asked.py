"""An engine for all kinds of requests: the class that `test_zoo.py` drives.

A request is a mapping: `prompt` in token ids, and optional `picture` (a colour), `sound` (a pitch),
`lora` (an adapter's folder), `json` (a schema), `tokens`; or `pool`, a pooling task.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.vllm.engine import Engine

TOKENS = 10
RATE_HZ = 16_000


class Asked(Engine):
    """One `vllm.LLM`. Its methods return values that JSON keeps, to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self._adapters: dict[str, int] = {}
        self._done: dict[str, Any] = {}

    def start(self, **arguments: Any) -> None:
        import torch._dynamo

        # vLLM compiles one of its own functions even so, for seconds in each engine
        torch._dynamo.config.disable = bool(arguments["enforce_eager"])
        _stand_in_for_packages()
        _mend_speculation()
        _compile_grammars_at_once()
        super().start(**arguments)

    def put(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Add requests, without computing anything yet."""
        for one in requests:
            self._asked += 1
            number = str(self._asked)
            self._done[number] = None
            lora = self._lora(one["lora"]) if "lora" in one else None
            self._llm.llm_engine.add_request(
                number, _prompt(one), _settings(one), lora_request=lora
            )

    def go(self, steps: int) -> bool:
        """Make so many steps, or all that are left; returns whether a request is open."""
        engine = self._llm.llm_engine
        while steps > 0 and engine.has_unfinished_requests():
            steps -= 1
            for output in engine.step():
                self._done[output.request_id] = output
        return bool(engine.has_unfinished_requests())

    def answers(self) -> list[Any]:
        """The answers to all requests since the last call, in order; no request may be open."""
        done, self._done = list(self._done.values()), {}
        return [_said(output) for output in done]

    def answer(self, sets: Sequence[Sequence[Mapping[str, Any]]]) -> list[Any]:
        """The answers to sets of requests: the sets one after the other, each all at once."""
        said = []
        for requests in sets:
            self.put(requests)
            while self.go(1):
                pass
            said.append(self.answers())
        return said

    def runs_ahead(self) -> bool:
        """Whether the core, in this process, schedules a step before it reads the last one."""
        core = self._llm.llm_engine.engine_core.engine_core
        return bool(core.async_scheduling and core.batch_queue is not None)

    def adapt(self, folder: str) -> bool:
        """Load the adapter in `folder`."""
        return bool(self._llm.llm_engine.add_lora(self._lora(folder)))

    def forget(self, folder: str) -> bool:
        """Drop it again."""
        return bool(self._llm.llm_engine.remove_lora(self._adapters.pop(folder)))

    def counters(self) -> dict[str, float]:
        """vLLM's own counters, by name."""
        return {one.name: one.value for one in self._llm.get_metrics() if hasattr(one, "value")}

    def _lora(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(folder, len(self._adapters) + 1)
        return LoRARequest(lora_name=folder, lora_int_id=number, lora_path=folder)


def _stand_in_for_packages() -> None:
    """Replace packages that vLLM imports but does not use here, and that are not installed."""
    import transformers

    transformers.MistralCommonBackend = type("MistralCommonBackend", (), {})
    sys.modules.setdefault("lmformatenforcer", _module("lmformatenforcer", TokenEnforcer=object))
    as_python = {"jit": _as_it_is, "njit": _as_it_is, "prange": range}
    threads = {"get_num_threads": lambda: 1, "set_num_threads": lambda number: None}
    numba = _module("numba", config=SimpleNamespace(THREADING_LAYER=""), **as_python, **threads)
    sys.modules.setdefault("numba", numba)


def _mend_speculation() -> None:
    """Move vLLM's kernels for CPUs to the place where this version looks for them."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import utils

    for one in [*vars(rejection_sampler).values(), *vars(utils).values()]:
        name = getattr(getattr(one, "kernel", None), "__name__", "")
        if name and hasattr(cpu_triton_utils, name):
            one.kernel = getattr(cpu_triton_utils, name)


def _compile_grammars_at_once() -> None:
    """vLLM compiles them in threads: how long that takes would decide which requests share a batch,
    and so the last bits."""
    from vllm.v1.structured_output import StructuredOutputManager

    StructuredOutputManager._use_async_grammar_compilation = property(
        lambda _: False, lambda *_: None
    )


def _module(name: str, **contents: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def _as_it_is(*given: object, **how: object) -> Callable[[Any], Any]:
    """numba's decorator, without compiling."""
    return lambda function: function


def _prompt(asked: Mapping[str, Any]) -> dict[str, Any]:
    media: dict[str, Any] = {}
    if "picture" in asked:
        from PIL import Image

        media["image"] = Image.new("RGB", (112, 112), tuple(asked["picture"]))
    if "sound" in asked:
        import numpy as np

        at = np.arange(RATE_HZ // 2, dtype=np.float32) / RATE_HZ
        media["audio"] = (np.sin(2 * np.pi * asked["sound"] * at), RATE_HZ)
    prompt = {"prompt_token_ids": list(asked["prompt"])}
    return {**prompt, "multi_modal_data": media} if media else prompt


def _settings(asked: Mapping[str, Any]) -> Any:
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "pool" in asked:
        return PoolingParams(task=asked["pool"])
    schema = asked.get("json")
    return SamplingParams(
        max_tokens=asked.get("tokens", TOKENS),
        temperature=0,
        detokenize=schema is not None,
        ignore_eos=schema is None,
        logprobs=2,
        structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
    )


def _said(output: Any) -> Any:
    if not hasattr(output.outputs, "__len__"):
        return _exactly(output.outputs.data)
    (one,) = output.outputs
    likely = [{str(k): v.logprob.hex() for k, v in step.items()} for step in one.logprobs]
    return [list(one.token_ids), one.text, likely]


def _exactly(tensor: Any) -> list[str]:
    """A short tensor's numbers, and a digest of its bytes."""
    flat = tensor.float().flatten()
    sum_ = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return [*(value.hex() for value in flat[:4].tolist()), sum_]
