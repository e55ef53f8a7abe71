"""Checks while a stage loads that its layers compute the same after their weights have moved.

A kernel may keep the address of a weight, or a copy of it, in a hidden place. So each call of a
module with weights is recorded and repeated: before the weights move, and afterwards, when their
old place has been overwritten. The outputs must be equal, bit for bit. Calls are compared one by
one, because attention has no cache yet. Floating-point inputs are random, because a dummy forward
often computes zeros, and zero times anything is zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only

from swapd_client.errors import SwapdError
from swapd_client.log import log
from swapd_client.memory.movable import leaves
from swapd_client.offload.copies import start_of
from swapd_client.vllm.eager import eager
from swapd_client.vllm.kernel_tensors import INPUT, aliases_of, width_of

#: Seed of the random inputs; equal for all ranks of a stage.
_SEED = 20
_ROWS = 2

_AGAIN = 3

#: Of each tensor in a call's output: shape, dtype, bytes.
Out = tuple[tuple[tuple[int, ...], torch.dtype, bytes], ...]

Context = Callable[[], AbstractContextManager[object]]
#: The module to hold for a call of a module, or None; and a context that holds it.
Around = Callable[[Module], Module | None]
Hold = Callable[[Module | None], AbstractContextManager[object]]


def nothing(module: Module) -> None:
    """No module to hold, because all are held."""


class PointerKept(SwapdError, RuntimeError):
    """A layer computes differently after its weights have moved; the message names it."""


class Call(NamedTuple):
    name: str
    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RecordedCalls:
    def __init__(self, context: Context = nullcontext) -> None:
        self._context = context
        self._calls: list[Call] = []
        #: Output by call. None: not reproducible, so there is nothing to compare.
        self._expected: list[Out | None] = []

    @contextmanager
    def noted(self, models: Mapping[str, Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for key, model in models.items():
                for path, module in model.named_modules(prefix=key):
                    hook = module.register_forward_pre_hook(self._noting(path), with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def add_linear(self, models: Mapping[str, Module]) -> None:
        called = {id(call.module) for call in self._calls}
        on_gpu = any(one.is_cuda for model in models.values() for one in model.parameters())
        for key, model in models.items():
            for path, module in model.named_modules(prefix=key):
                given = None if id(module) in called else _linear_input(module)
                # a layer that is still on the host has no output on the GPU to compare with
                if given is not None and given.is_cuda == on_gpu:
                    self._calls.append(Call(path, module, (given,), {}))

    def settle(self) -> None:
        """Record each call's output before the weights move."""
        once, again = self._made(), self._made()
        self._expected = [
            out if out == other else None for out, other in zip(once, again, strict=True)
        ]

    def compare(self, stage: str, around: Around = nothing, hold: Hold = nullcontext) -> None:
        """Repeat each call under `hold(around(module))`, after the weights have moved.

        Raises: PointerKept, which names the first call that differs.
        """
        made = self._made(around, hold)
        for call, before, now in zip(self._calls, self._expected, made, strict=True):
            if before not in (None, now) and self._differs(call, before, around, hold):
                raise PointerKept(
                    f"stage {stage!r}: {call.name} ({_kind(call.module)}) computes other results "
                    "once its weights have moved: it keeps their address, or reads their old "
                    "place. It cannot take turns. Load the model with another quantisation or "
                    "another kernel for this layer, or run the stage without swapd"
                )
        if checked := sum(out is not None for out in self._expected):
            log.info("%s computes the same, bit for bit, in %d layers", stage, checked)

    def _differs(self, call: Call, before: Out, around: Around, hold: Hold) -> bool:
        """Return whether a call's output is always the same, and not the old output.

        A kernel that adds in any order may have returned the old output twice by chance.
        """
        with self._alone(), hold(around(call.module)):
            again = {_out_of(call) for _ in range(_AGAIN)}
        return before not in again and len(again) == 1

    def _noting(self, name: str) -> Callable[..., None]:
        noted = False

        def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal noted
            if not noted and _computes_with_weights(module, args):
                noted = True  # clone: some kernels overwrite their inputs
                given = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
                self._calls.append(Call(name, module, *given))

        return note

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with torch.inference_mode(), eager(), self._context():
            yield

    def _made(self, around: Around = nothing, hold: Hold = nullcontext) -> list[Out | None]:
        out: list[Out | None] = []
        with self._alone():
            for held, calls in groupby(self._calls, lambda call: around(call.module)):
                with hold(held):
                    out += map(_out_of, calls)
        return out


class OldMemory:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of `tensors` until `leave`."""
        self._were = [(one, one.data) for tensor in tensors for _, one in leaves("", tensor)]

    def overwrite(self) -> list[torch.Tensor]:
        """Overwrite the old place of tensors that have moved, with NaN or zero.

        Returns tensors that still use the old memory, which is not overwritten.
        """
        moved = [old for tensor, old in self._were if old.data_ptr() != tensor.data_ptr()]
        still = aliases_of(moved)
        used = {start_of(one) for one in still}
        with torch.inference_mode():
            for old in moved:
                if old.numel() and start_of(old) not in used:
                    span = sum((n - 1) * s for n, s in zip(old.shape, old.stride(), strict=True))
                    _spoil(old.as_strided((span + 1,), (1,)))
        return still

    def leave(self) -> None:
        self._were.clear()


def _computes_with_weights(module: Module, args: tuple[Any, ...]) -> bool:
    """Return whether to repeat a module's calls.

    Containers may change state of their own; attention without a cache leaves its output unchanged.
    """
    if hasattr(module, "kv_cache"):
        return False
    if getattr(module, "quant_method", None) is not None:
        return True
    if any(isinstance(one, Module) for one in args):  # as vLLM's logits processor gets its head
        return True
    own = any(one is not None for one in module._parameters.values())
    return own and next(module.children(), None) is None


def _linear_input(module: Module) -> torch.Tensor | None:
    if not _computes_with_weights(module, ()):
        return None
    width = width_of(module, INPUT)
    weight = next((one for one in module._parameters.values() if one is not None), None)
    if width is None or weight is None:
        return None
    dtype = getattr(module, "params_dtype", weight.dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return None
    return torch.zeros(_ROWS, width, dtype=dtype, device=weight.device)


def _out_of(call: Call) -> Out | None:
    given = partial(_random, torch.Generator().manual_seed(_SEED))
    args, kwargs = tree_map_only(torch.Tensor, given, (call.args, call.kwargs))
    try:
        out = call.module(*args, **kwargs)
    except Exception as exc:  # noqa: BLE001 - any error: this call is not comparable
        log.debug("%s cannot be called by itself: %r", call.name, exc)
        return None
    tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
    return tuple((tuple(one.shape), one.dtype, _bytes(one)) for one in tensors)


def _random(numbers: torch.Generator, given: torch.Tensor) -> torch.Tensor:
    if given.is_floating_point() and given.dtype.itemsize in (2, 4):
        return torch.randn(given.shape, generator=numbers).to(given)
    return given.clone()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _spoil(flat: torch.Tensor) -> None:
    if flat.is_floating_point() and flat.dtype.itemsize > 1:
        flat.fill_(float("nan"))
    elif flat.is_floating_point():
        flat.view(torch.uint8).fill_(0x7F)  # NaN in both kinds of fp8
    else:
        flat.zero_()


def _kind(module: Module) -> str:
    method = getattr(module, "quant_method", None)
    kind = type(module).__name__
    return kind if method is None else f"{kind} with {type(method).__name__}"
