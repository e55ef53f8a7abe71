"""vLLM's schedulers without a model: what a request gets whose cache is lost while steps run ahead.

What stands for the model says of each token which it is, and garbage where it would read from a
cache that is gone.
"""

from collections import deque
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from swapd_client.vllm import scheduler

BLOCK = 16
PROMPT = list(range(40))
TOKENS = 24
#: What is said of a token that was computed from nothing.
GARBAGE = 9999


class Model:
    """What a worker returns of a step, in order of steps. Its cache is lost before some of them."""

    def __init__(self, lost_before: set[int]) -> None:
        self._lost_before = lost_before
        self._steps = 0
        self.losses = 0
        #: By block, how many of its tokens are there.
        self._there: dict[int, int] = {}
        self._blocks: dict[str, list[int]] = {}
        #: Steps that did not count.
        self.void = 0

    def step(self, scheduled: Any) -> ModelRunnerOutput:
        self._steps += 1
        if self._steps in self._lost_before:
            self.losses += 1
            self._there.clear()
        said = {name: self._token(scheduled, name) for name in scheduled.num_scheduled_tokens}
        output = ModelRunnerOutput(
            req_ids=list(said),
            req_id_to_index={name: number for number, name in enumerate(said)},
            sampled_token_ids=[[token] for token in said.values()],
        )
        if not scheduler.is_void(scheduled, self.losses):
            return output
        self.void += 1
        return scheduler.void(output, self.losses)

    def _token(self, scheduled: Any, name: str) -> int:
        """The number of the token that it samples, if all before are in the cache."""
        computed = self._note(scheduled, name)
        blocks, end = self._blocks[name], computed + scheduled.num_scheduled_tokens[name]
        whole = all(
            self._there.get(block, 0) >= min(computed - number * BLOCK, BLOCK)
            for number, block in enumerate(blocks)
            if number * BLOCK < computed
        )
        for number, block in enumerate(blocks):
            if number * BLOCK < end:
                there = min(end - number * BLOCK, BLOCK)
                self._there[block] = max(self._there.get(block, 0), there) if whole else 0
        return end - len(PROMPT) if whole else GARBAGE

    def _note(self, scheduled: Any, name: str) -> int:
        """Which blocks it has; returns how many of its tokens are computed."""
        for new in scheduled.scheduled_new_reqs:
            if new.req_id == name:
                self._blocks[name] = list(new.block_ids[0])
                return int(new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        at = cached.req_ids.index(name)
        if (more := cached.new_block_ids[at]) is not None:
            known = [] if name in cached.resumed_req_ids else self._blocks[name]
            self._blocks[name] = [*known, *more[0]]
        return int(cached.num_computed_tokens[at])


def said(
    model: str, ahead: bool, prefixes: bool, lost_before: list[int]
) -> tuple[dict[str, list[int]], int, int]:
    """What two requests that begin alike get, how often it was lost, and how many steps were void.

    `ahead`: with `async_scheduling`, by which a step is scheduled while another runs.
    """
    made = _scheduler(model, ahead, prefixes)
    worker = Model({*lost_before})
    got: dict[str, list[int]] = {}
    running: deque[tuple[Any, ModelRunnerOutput]] = deque()
    coming = ["a", "b"]
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256")) if prefixes else None
    while coming or running or made.has_unfinished_requests():
        if coming:
            one = coming.pop(0)
            wanted = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
            made.add_request(Request(one, PROMPT, wanted, None, block_hasher=hasher))
            got[one] = []
        scheduled = made.schedule()
        if scheduled.total_num_scheduled_tokens:
            running.append((scheduled, worker.step(scheduled)))
        if running and (len(running) > ahead or not scheduled.total_num_scheduled_tokens):
            for outputs in made.update_from_output(*running.popleft()).values():
                for output in outputs.outputs:
                    got[output.request_id] += output.new_token_ids
    return got, worker.losses, worker.void


def _scheduler(model: str, ahead: bool, prefixes: bool) -> Any:
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=BLOCK,
        enable_prefix_caching=prefixes,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = ahead  # vLLM leaves it out on a CPU
    config.cache_config.num_gpu_blocks = 64
    init_none_hash(get_hash_fn_by_name("sha256"))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    kind = scheduler.AsyncScheduler if ahead else scheduler.Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
