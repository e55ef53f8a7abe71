"""The move of a stage's weights into swapd, and the check that it computes the same."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch.nn import Module

from swapd.shared.units import size
from swapd_client.log import log
from swapd_client.vllm import kernel_tensors
from swapd_client.vllm.eager import eager
from swapd_client.vllm.kernel_tensors import Candidates
from swapd_client.vllm.ranks import stage_of
from swapd_client.vllm.selfcheck import Around, Context, Hold, OldMemory, RecordedCalls, nothing

#: Least share of a stage's bytes that must be in swapd.
ENOUGH = 0.95
_NAMED = 3

Take = Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], int]


class WeightMove:
    """First `move`; then `compare`, once the weights can be leased."""

    def __init__(self, name: str, *, keep_place: bool) -> None:
        """`keep_place`: whether the weights' old memory is kept until `compare`."""
        self._name = name
        self._keep_place = keep_place
        self._calls = RecordedCalls()
        self._place = OldMemory(())
        #: Moved tensors that are not parameters, by name.
        self._outside: Mapping[str, torch.Tensor] = {}
        #: Bytes of weights before the move, wherever a kernel had put them.
        self.held = 0
        #: Tensors found outside of parameters that have not moved.
        self._left: list[kernel_tensors.KernelTensor] = []

    def move(
        self,
        models: Mapping[str, Module],
        take: Take,
        forward: Callable[[], None],
        context: Context = nullcontext,
    ) -> int:
        """Move all weights that can be moved into swapd; return their bytes.

        `take(outside, aliases)` moves the parameters of `models` and these tensors. `forward()`
        computes with all layers; calls of single layers are in `context()`. Raises as `take`.
        """
        found = Candidates(models)
        self._note(models, forward, context)
        weights = found.weights()
        parameters = chain.from_iterable(one.parameters() for one in models.values())
        all_of_it = [*parameters, *weights.values()]
        packed = kernel_tensors.packed_bytes(models, found.found)
        self.held = sum(one.nbytes for one in all_of_it) + packed
        aliases = _aliases(all_of_it)
        self._place = OldMemory([*all_of_it, *aliases])
        places = [one.tensor.data_ptr() for one in found.found]
        moved = take(weights, aliases)
        if still := self._place.overwrite():
            log.warning(
                "%s: %d tensors keep the memory that weights had before they moved into swapd: "
                "add it to the stage's own memory (gpu_memory_utilization)",
                self._name,
                len(still),
            )
        if not self._keep_place:
            self._place.leave()
        self._outside = weights
        now = zip(found.found, places, strict=True)
        self._left = [one for one, place in now if one.tensor.data_ptr() == place]
        return moved

    def move_unread(self, models: Mapping[str, Module], take: Take) -> int:
        """As `move`, of weights whose bytes are only in the daemon: there is nothing to compare."""
        parameters = chain.from_iterable(one.parameters() for one in models.values())
        shared = [*filter(_shares_storage, parameters)]
        return take({}, _aliases(shared) if shared else ())

    def _note(
        self, models: Mapping[str, Module], forward: Callable[[], None], context: Context
    ) -> None:
        self._calls = RecordedCalls(context)
        try:
            with eager(models.values()), self._calls.noted(models):
                forward()
        except Exception as exc:  # noqa: BLE001 - a model may need more than exists while it loads
            log.warning(
                "cannot run %s before its weights move (%r): only linear layers are checked",
                self._name,
                exc,
            )
        self._calls.add_linear(models)
        self._calls.settle()

    def compare(self, around: Around = nothing, hold: Hold = nullcontext) -> None:
        self._calls.compare(self._name, around, hold)
        self._place.leave()
        self._calls = RecordedCalls()  # they hold inputs and outputs of every layer

    def warn_of_rest(self, read: int | None, moved: int) -> None:
        """`read`: bytes of all weights, None if unknown."""
        if not read or moved >= read * ENOUGH:
            return
        left = kernel_tensors.largest(self._left, _NAMED)
        named = ", ".join(f"{one.name} ({size(one.tensor.nbytes)})" for one in left)
        log.warning(
            "%s has %s of weights, and %s of them in swapd (%d %%): the rest is in private memory, "
            "and stays there when the stage gives way%s",
            self._name,
            size(read),
            size(moved),
            100 * moved // read,
            f"; such as {named}" if named else "",
        )

    def warn_of_more(self, read: int | None, moved: int) -> None:
        if read and moved * ENOUGH > read:
            log.warning(
                "%s has %s of weights in swapd, and its tensors in the model's files are %s. "
                "`swapd plan` counts the files alone: give it sizes in place of the model's "
                "folder, with %s=%dMiB",
                self._name,
                size(moved),
                size(read),
                stage_of(self._name),
                -(-moved >> 20),
            )

    def warn_of_new(self, models: Mapping[str, Module]) -> None:
        """After new weights were loaded, warn if kernels now keep weights outside of swapd."""
        if not self._outside:
            return
        new = [
            one.tensor.nbytes
            for one in kernel_tensors.found_in(models)
            if one.tensor is not self._outside.get(one.name, one.tensor)
        ]
        if new:
            log.warning(
                "kernels of %s have put %s of its new weights into private memory: "
                "start the stage again to have them take turns",
                self._name,
                size(sum(new)),
            )


def _aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*filter(kernel_tensors.is_plain, kernel_tensors.aliases_of(tensors))]


def _shares_storage(tensor: torch.Tensor) -> bool:
    """Return whether anything else may have the tensor's storage. A full search takes 0.3 s.

    If a sharer is missed, the component has another layout, for which the daemon has kept nothing.
    """
    alone = torch.empty(1)
    one, other = (t.untyped_storage() for t in (tensor, alone))
    count = torch._C._storage_Use_Count
    return bool(count(one._cdata) > count(other._cdata))
