"""vLLM's KV cache in a buffer of swapd: its size, the places of its blocks, and refusals."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import envs

from swapd_client.vllm.ranks import ranks_of
from swapd_client.vllm.stage.kv_cache import BlocksInUse, KvTerms, Layer, StageCache
from swapd_client.vllm.stage.lost_blocks import RequestStep

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def nbytes_of(config: "KVCacheConfig") -> int:
    return max((tensor.size for tensor in config.kv_cache_tensors), default=0)


def layers_of(config: "KVCacheConfig") -> list[Layer]:
    return [
        Layer(tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number in range(len(tensor.layers))
    ]


def block_tokens_of(config: "KVCacheConfig") -> list[int]:
    return [group.kv_cache_spec.block_size for group in config.kv_cache_groups]


def problem_with(
    config: "KVCacheConfig", vllm_config: Any, terms: KvTerms, *, apart: bool
) -> str | None:
    """Return why this cache cannot take turns, with a remedy.

    `apart`: whether the stage has weights that are leased for some steps only.
    """
    if connector := _connector_of(vllm_config):
        return f"a KV connector copies blocks at any time: leave out {connector}"
    if not terms.saved and (problem := _problem_with_dropping(vllm_config, terms, apart=apart)):
        return problem
    tensors = config.kv_cache_tensors
    if len({tensor.size for tensor in tensors}) > 1 or any(
        getattr(tensor, "host_resident", False) for tensor in tensors
    ):
        return "it is not one buffer of device memory"
    return _problem_with_dtype(config, vllm_config) or _problem_with_layers(config, terms)


def _problem_with_dropping(vllm_config: Any, terms: KvTerms, *, apart: bool) -> str | None:
    if terms.prefixes and terms.unreported:
        return (
            f"its scheduler would reuse dropped blocks as prefixes: {terms.unreported}"
            "; or enable_prefix_caching: false, or kv: auto"
        )
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return (
            "an engine without a process of its own does not report that its last request has "
            "ended: set VLLM_ENABLE_V1_MULTIPROCESSING=1, or kv: auto"
        )
    if apart or ranks_of(vllm_config.parallel_config) > 1:
        return "several ranks, or encoders that come and go, give way in between: set kv: auto"
    return None


def _problem_with_layers(config: "KVCacheConfig", terms: KvTerms) -> str | None:
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if odd := {*kinds}.difference(_TESTED):
        return f"{', '.join(sorted(odd))}: swapd has not been tested with it"
    if len(kinds) > 1 and terms.prefixes:
        return (
            "its layers are of several kinds, and prefixes are cached: set "
            "enable_prefix_caching: false"
        )
    return None


def _problem_with_dtype(config: "KVCacheConfig", vllm_config: Any) -> str | None:
    """vLLM accepts some dtypes on a CPU that the attention backend does not list."""
    layers = vllm_config.compilation_config.static_forward_context
    for layer in (layers[name] for group in config.kv_cache_groups for name in group.layer_names):
        backend, dtype = layer.get_attn_backend(), getattr(layer, "kv_cache_dtype", None)
        if not backend.supports_kv_cache_dtype(dtype):
            known = ", ".join(backend.supported_kv_cache_dtypes)
            return f"{backend.get_name()} has no kv_cache_dtype {dtype}: set {known}"
    return None


def _connector_of(vllm_config: Any) -> str | None:
    if vllm_config.kv_transfer_config is not None:
        return "kv_transfer_config"
    of_omni = getattr(vllm_config.model_config, "omni_kv_config", None) or {}
    return next((f"omni_kv_config.{key}" for key in _OF_OMNI if of_omni.get(key)), None)


_OF_OMNI = ("need_send_cache", "need_recv_cache")

#: Kinds of layers whose blocks are where `layers_of` says.
_TESTED = ("FullAttentionSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs", "MLAAttentionSpec")


class _Zeros(TorchFunctionMode):
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
    """In the block vLLM makes its KV cache over `buffer`, which is zeros.

    Raises: RuntimeError if vLLM has made it elsewhere.
    """
    with _Zeros(buffer) as zeros:
        yield
    if not zeros.taken:
        raise RuntimeError(
            "this version of vLLM does not make its KV cache as one buffer: set kv: private"
        )


def note(in_use: BlocksInUse, scheduled: Any) -> None:
    for new in scheduled.scheduled_new_reqs:
        in_use.has(new.req_id, new.block_ids)
    cached = scheduled.scheduled_cached_reqs
    if not any(cached.new_block_ids):  # as in most steps
        return
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            (in_use.has if request in cached.resumed_req_ids else in_use.gets)(request, blocks)


def steps_of(cache: StageCache, scheduled: Any) -> Iterator[RequestStep]:
    cached = scheduled.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    new = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
    anew = {*new, *cached.resumed_req_ids}
    computed |= new
    for request, tokens in scheduled.num_scheduled_tokens.items():
        yield RequestStep(
            request, cache.tables(request), computed[request], tokens, request in anew
        )
