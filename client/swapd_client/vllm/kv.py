"""vLLM's KV cache over a buffer of swapd's: how much it is, where its blocks are, what is refused.

What becomes of it between two turns is said by `stage/cache.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import envs

from swapd_client.vllm.stage.cache import Cache, InUse, Layer, Terms
from swapd_client.vllm.stage.gone import Share

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def nbytes_of(config: "KVCacheConfig") -> int:
    """How much vLLM is going to allocate, in one buffer; 0 if the model has no cache."""
    return max((tensor.size for tensor in config.kv_cache_tensors), default=0)


def layers_of(config: "KVCacheConfig") -> list[Layer]:
    """Where each layer's share of a block is in that buffer."""
    return [
        Layer(tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number in range(len(tensor.layers))
    ]


def block_tokens_of(config: "KVCacheConfig") -> list[int]:
    """By group of layers, how many tokens a block holds."""
    return [group.kv_cache_spec.block_size for group in config.kv_cache_groups]


def problem_with(
    config: "KVCacheConfig", vllm_config: Any, terms: Terms, *, apart: bool
) -> str | None:
    """Why this cache cannot take turns, and what to change; None if it can.

    `apart`: the stage has weights that are leased for some steps alone.
    """
    if connector := _connector_of(vllm_config):
        return f"a KV connector copies blocks at any time: leave out {connector}"
    if not terms.saved:
        if terms.prefixes and terms.deaf:
            return (
                f"what is dropped is no prefix, and its scheduler does not hear of it: {terms.deaf}"
                "; or enable_prefix_caching: false, or kv: auto"
            )
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            return (
                "an engine without a process of its own does not say that its last request has "
                "ended: set VLLM_ENABLE_V1_MULTIPROCESSING=1, or kv: auto"
            )
        if apart or vllm_config.parallel_config.tensor_parallel_size > 1:
            return "several ranks, or encoders that come and go, give way in between: set kv: auto"
    if len({tensor.size for tensor in config.kv_cache_tensors}) > 1 or any(
        getattr(tensor, "host_resident", False) for tensor in config.kv_cache_tensors
    ):
        return "it is not one buffer of device memory"
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    odd = sorted({type(s).__name__ for s in specs if type(s).__name__ not in _TESTED})
    if odd:
        return f"{', '.join(odd)}: swapd has not been tested with it"
    if len(specs) > 1 and terms.prefixes:
        return (
            "its layers are of several kinds, and prefixes are cached: set "
            "enable_prefix_caching: false"
        )
    return None


def _connector_of(vllm_config: Any) -> str | None:
    """What in the configuration has another stage, or a store, read blocks or write to them."""
    if vllm_config.kv_transfer_config is not None:
        return "kv_transfer_config"
    of_omni = getattr(vllm_config.model_config, "omni_kv_config", None) or {}
    return next((f"omni_kv_config.{key}" for key in _OF_OMNI if of_omni.get(key)), None)


#: Of vllm-omni's `omni_kv_config`: what has blocks go from stage to stage.
_OF_OMNI = ("need_send_cache", "need_recv_cache")

#: Kinds of layers whose blocks are where `layers_of` says.
_TESTED = ("FullAttentionSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs", "MLAAttentionSpec")


class _Zeros(TorchFunctionMode):
    """Has one `torch.zeros` be a buffer that is there, and is zeros: that of the KV cache."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self._buffer = buffer.view(torch.int8)
        self.taken = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        asked = (func, args, kwargs.get("dtype"))
        if not self.taken and asked == (torch.zeros, (self._buffer.numel(),), torch.int8):
            self.taken = True
            return self._buffer
        return func(*args, **kwargs)


@contextmanager
def made_over(buffer: torch.Tensor) -> Iterator[None]:
    """While in it vLLM makes its KV cache over `buffer`, which is zeros; every layer is a view.

    Raises: RuntimeError if it has made it elsewhere.
    """
    with _Zeros(buffer) as zeros:
        yield
    if not zeros.taken:
        raise RuntimeError(
            "this version of vLLM does not make its KV cache as one buffer: set kv: private"
        )


def note(in_use: InUse, scheduled: Any) -> None:
    """What a step's `SchedulerOutput` says of blocks; once the step has its lease."""
    for new in scheduled.scheduled_new_reqs:
        in_use.has(new.req_id, new.block_ids)
    cached = scheduled.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            (in_use.has if request in cached.resumed_req_ids else in_use.gets)(request, blocks)


def shares_of(cache: Cache, scheduled: Any) -> Iterator[Share]:
    """What each request reads and writes in a step that was noted, in the order of scheduling."""
    cached = scheduled.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    new = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
    anew = {*new, *cached.resumed_req_ids}
    computed |= new
    for request, tokens in scheduled.num_scheduled_tokens.items():
        yield Share(request, cache.tables(request), computed[request], tokens, request in anew)
