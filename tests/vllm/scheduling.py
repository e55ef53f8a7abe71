"""vLLM's schedulers without a model: the tokens of requests whose cache is lost, also while steps
run ahead.

A stand-in for the model gives each token its number, and garbage if it would read from a lost
cache.
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from swapd_client.log import log
from swapd_client.vllm import scheduler
from swapd_client.vllm.ranks import LossCounts
from swapd_client.vllm.stage.kv_cache import KvTerms, Layer, StageCache

BLOCK = 16
PROMPT = list(range(40))
TOKENS = 24
#: The token that is sampled from lost contents, and the contents of slots that were never written.
GARBAGE, NOTHING = 9999, 0


class Model:
    """Computes the output of each step as a worker does. Its cache is lost before some of them."""

    def __init__(
        self,
        lost_before: set[int],
        *,
        by_number: bool,
        prefixes: bool,
        fenced_in: Collection[int] = (),
    ) -> None:
        """`fenced_in`: the steps that compute on others' memory, and know it when they are over."""
        self._lost_before = lost_before
        self._fenced_in = fenced_in
        self._steps = 0
        self.losses = 0
        component: Any = SimpleNamespace(name="model.kv", nbytes=0, lost=True)
        terms = KvTerms("drop", prefixes, [Layer(0, 0)], by_number=by_number, block_tokens=[BLOCK])
        self._cache = StageCache(component, terms, LossCounts())
        #: The contents of each block's slots: a number that depends on all tokens before.
        self._there: dict[int, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        #: Steps that did not count.
        self.void = 0

    def step(self, scheduled: Any) -> Callable[[], ModelRunnerOutput]:
        """Returns a function that returns the output later."""
        self._steps += 1
        fenced = self._steps in self._fenced_in
        self._cache.in_use.ended(scheduled.finished_req_ids)
        if self._steps in self._lost_before:
            self.losses += 1
            self._cache.go_alone()
            self._there.clear()
        verdict = scheduler.verdict_of(self._cache, scheduled)
        said = {
            name: self._token(scheduled, name, fenced=fenced)
            for name in scheduled.num_scheduled_tokens
        }
        output = ModelRunnerOutput(
            req_ids=list(said),
            req_id_to_index={name: number for number, name in enumerate(said)},
            sampled_token_ids=[[] if token is None else [token] for token in said.values()],
        )

        def get_output() -> ModelRunnerOutput:
            told = partial(scheduler.verdict_of_fence, self._cache) if fenced else verdict
            counted = scheduler.with_verdict(output, told)
            self.void += counted is not output
            return counted

        return get_output

    def _token(self, scheduled: Any, name: str, *, fenced: bool) -> int | None:
        """The number of tokens before the one that it samples, if the cache had all their contents;
        else `GARBAGE`. None while the known tokens are not all computed.
        """
        computed = self._note(scheduled, name)
        blocks, tokens = self._blocks[name], self._tokens[name]
        end = computed + scheduled.num_scheduled_tokens[name]
        should_be = list(accumulate(tokens, lambda before, token: hash((before, token))))
        read = [one for block in blocks for one in self._there.get(block, [NOTHING] * BLOCK)]
        whole = read[:computed] == should_be[:computed] and not fenced
        for at in range(computed, end):
            slots = self._there.setdefault(blocks[at // BLOCK], [NOTHING] * BLOCK)
            slots[at % BLOCK] = should_be[at] if whole else GARBAGE
        if end < len(tokens):
            return None
        tokens.append(end if whole else GARBAGE)
        return tokens[-1]

    def _note(self, scheduled: Any, name: str) -> int:
        """Note its blocks and tokens; returns the number of computed tokens."""
        for new in scheduled.scheduled_new_reqs:
            if new.req_id == name:
                self._blocks[name] = list(new.block_ids[0])
                self._tokens[name] = list(new.prompt_token_ids)
                self._prompts[name] = len(new.prompt_token_ids)
                return int(new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        at = cached.req_ids.index(name)
        if (more := cached.new_block_ids[at]) is not None:
            had = [] if name in cached.resumed_req_ids else self._blocks[name]
            self._blocks[name] = [*had, *more[0]]
        del self._tokens[name][self._prompts[name] + cached.num_output_tokens[at] :]
        return int(cached.num_computed_tokens[at])


def said(
    model: str, ahead: bool, prefixes: bool, lost_before: list[int], fenced_in: Sequence[int]
) -> tuple[dict[str, list[int]], int, int]:
    """The tokens of two requests with the same beginning, and the numbers of losses and void steps.

    `ahead`: with `async_scheduling`, where a step is scheduled while another runs.
    """
    kind = scheduler.AsyncScheduler if ahead else scheduler.Scheduler
    made = _scheduler(model, kind, prefixes=prefixes, ahead=ahead)
    worker = Model({*lost_before}, by_number=True, prefixes=prefixes, fenced_in=fenced_in)
    got: dict[str, list[int]] = {}
    running: deque[tuple[Any, Callable[[], ModelRunnerOutput]]] = deque()
    coming = ["a", "b"]
    while coming or running or made.has_unfinished_requests():
        if coming:
            one = coming.pop(0)
            made.add_request(_request(one, PROMPT, prefixes=prefixes))
            got[one] = []
        scheduled = made.schedule()
        if scheduled.total_num_scheduled_tokens:
            running.append((scheduled, worker.step(scheduled)))
        if running and (len(running) > ahead or not scheduled.total_num_scheduled_tokens):
            before, get_output = running.popleft()
            _take(got, made.update_from_output(before, get_output()))
    return got, worker.losses, worker.void


def said_of_each(model: str, cases: Sequence[Sequence[Any]]) -> list[Any]:
    """`said` of the arguments after `model`, for each case."""
    return [said(model, *case) for case in cases]


def said_by_vllms_own(
    model: str, prefixes: bool, seeds: Sequence[int]
) -> list[tuple[dict[str, list[int]], dict[str, int], int]]:
    """Random histories of vLLM's own scheduler. Returns the tokens of the requests that were not
    aborted, the length of each one's prompt, and the number of steps that did not count at all.

    Requests come and abort, and the cache is lost, at random. There are too few blocks for all, so
    the scheduler preempts some, and computes prompts in parts.
    """
    made = _scheduler(model, VllmScheduler, prefixes=prefixes, blocks=24, tokens=48)
    return [_history(made, random.Random(seed), prefixes=prefixes) for seed in seeds]


def _history(
    made: Any, chance: random.Random, *, prefixes: bool
) -> tuple[dict[str, list[int]], dict[str, int], int]:
    lost_before = {chance.randrange(1, 60) for _ in range(6)}
    made.reset_prefix_cache()
    worker = Model(lost_before, by_number=False, prefixes=prefixes)
    got: dict[str, list[int]] = {}
    long = {f"{name}": chance.choice([5, 40, 64, 70, 100]) for name in range(8)}
    coming = [*long]
    while coming or made.has_unfinished_requests():
        if coming and chance.random() < 0.3:
            one = coming.pop(0)
            begins = chance.choice([0, 1000])
            made.add_request(
                _request(one, list(range(begins, begins + long[one])), prefixes=prefixes)
            )
            got[one] = []
        if got and chance.random() < 0.05:
            one = chance.choice([*got])
            made.finish_requests(one, RequestStatus.FINISHED_ABORTED)
            del got[one]
        scheduled = made.schedule()
        get_output = worker.step(scheduled)
        _take(got, made.update_from_output(scheduled, get_output()))
    return got, {name: long[name] for name in got}, worker.void


def _take(got: dict[str, list[int]], said: dict[int, Any]) -> None:
    for outputs in said.values():
        for output in outputs.outputs:
            if output.request_id in got:
                got[output.request_id] += output.new_token_ids


def _request(name: str, prompt: list[int], *, prefixes: bool) -> Request:
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256")) if prefixes else None
    wanted = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return Request(name, prompt, wanted, None, block_hasher=hasher)


def _scheduler(
    model: str,
    kind: type[Any],
    *,
    prefixes: bool,
    ahead: bool = False,
    blocks: int = 64,
    tokens: int = 2048,
) -> Any:
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=256,
        block_size=BLOCK,
        enable_prefix_caching=prefixes,
        max_num_batched_tokens=tokens,
        max_num_seqs=8,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = ahead  # vLLM switches it off on a CPU
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(get_hash_fn_by_name("sha256"))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def streams() -> dict[str, list[str]]:
    """The log of a stage that streams, with a scheduler that has no chunks, by its executor."""

    def said(executor: str, *, chunks: bool = True) -> list[str]:
        base = type("Base", (), {"__init__": lambda self: None})
        of_scheduler = SimpleNamespace(scheduler_cls=base, get_scheduler_cls=lambda: base)
        config = SimpleNamespace(
            model_config=SimpleNamespace(async_chunk=chunks),
            parallel_config=SimpleNamespace(distributed_executor_backend=executor),
            scheduler_config=of_scheduler,
        )
        stage: Any = SimpleNamespace(name="talker")
        with patch.object(log, "info") as info:
            scheduler.use_chunk_counting(config, stage)
            of_scheduler.scheduler_cls()
        return [call.args[0] % call.args[1:] for call in info.call_args_list]

    return {"uni": said("uni"), "mp": said("mp"), "no chunks": said("mp", chunks=False)}
