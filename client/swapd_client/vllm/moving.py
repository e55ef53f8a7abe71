"""A stage's weights move into swapd: which do, whether the stage still computes the same, and what
is left. Does not import vLLM.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.nn import Module

from swapd.shared.units import size
from swapd_client.vllm import outside
from swapd_client.vllm.outside import Candidates
from swapd_client.vllm.selfcheck import Around, Calls, Context, Hold, Place, nothing

log = logging.getLogger("swapd_client")

#: Of what was read from files, how much is to be in swapd.
ENOUGH = 0.95
#: How many of the tensors that were left a warning names.
_NAMED = 3

Take = Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], int]


class Moving:
    """The move of one stage's weights: `move`, then `compare` when they can be leased."""

    def __init__(self, name: str, *, keep_place: bool) -> None:
        """`name`: the stage's. `keep_place`: where the weights were is kept until `compare`."""
        self._name = name
        self._keep_place = keep_place
        self._calls = Calls()
        self._place = Place(())
        #: What has moved and is no parameter, by name; and what else there is, and has not.
        self._outside: Mapping[str, torch.Tensor] = {}
        self._left: list[outside.Outside] = []

    def move(
        self,
        models: Mapping[str, Module],
        take: Take,
        forward: Callable[[], None],
        context: Context = nullcontext,
    ) -> int:
        """Have swapd take all that can be moved; how many bytes that is.

        `take(outside, aliases)` moves the parameters of `models`, and these, which are as
        `parts.parts_of` wants them. `forward()` computes something with all layers, and `context()`
        is entered when one of them is called alone. Raises as `take`.
        """
        parameters = [one for model in models.values() for one in model.parameters()]
        found = Candidates(models)
        self._note(models, forward, context)
        weights = found.weights()
        all_of_it = [*parameters, *weights.values()]
        aliases = [one for one in outside.aliases_of(all_of_it) if outside.is_plain(one)]
        self._place = Place([*all_of_it, *aliases])
        moved = take(weights, aliases)
        if still := self._place.overwrite():
            log.warning(
                "%s: %d tensors still lie over the memory that weights have left, which they keep: "
                "count it to what the stage needs beside swapd (gpu_memory_utilization)",
                self._name,
                len(still),
            )
        if not self._keep_place:
            self._place.leave()
        self._outside = weights
        taken = {id(one) for one in (*weights.values(), *aliases)}
        self._left = [one for one in found.found if id(one.tensor) not in taken]
        return moved

    def _note(
        self, models: Mapping[str, Module], forward: Callable[[], None], context: Context
    ) -> None:
        self._calls = Calls(context)
        try:
            with self._calls.noted(models):
                forward()
        except Exception as exc:  # noqa: BLE001 - a model may want more than there is as it loads
            log.warning(
                "%s cannot be run before its weights move (%r): only linear layers are checked",
                self._name,
                exc,
            )
        self._calls.add_linear(models)
        self._calls.settle()

    def compare(self, around: Around = nothing, hold: Hold = nullcontext) -> None:
        """See whether the layers compute what they did: `Calls.compare`."""
        self._calls.compare(self._name, around, hold)
        self._place.leave()
        self._calls = Calls()  # it has inputs and outputs of every layer

    def warn_of_rest(self, read: int | None, moved: int) -> None:
        """Warn if of `read` bytes of weights, None if that is not known, too few were moved."""
        if not read or moved >= read * ENOUGH:
            return
        left = outside.largest(self._left, _NAMED)
        named = ", ".join(f"{one.name} ({size(one.tensor.nbytes)})" for one in left)
        log.warning(
            "%s has %s of weights, and %s of them in swapd (%d %%): the rest is kept in memory of "
            "this process's own, and stays there when the stage gives way%s",
            self._name,
            size(read),
            size(moved),
            100 * moved // read,
            f"; such as {named}" if named else "",
        )

    def warn_of_new(self, models: Mapping[str, Module]) -> None:
        """New weights were loaded: warn if kernels keep theirs elsewhere than in swapd now."""
        if not self._outside:
            return
        new = [
            one.tensor.nbytes
            for one in outside.found_in(models)
            if one.tensor is not self._outside.get(one.name, one.tensor)
        ]
        if new:
            log.warning(
                "%s has %s of its new weights in memory of this process's own, where kernels have "
                "put them: start the stage again to have them take turns",
                self._name,
                size(sum(new)),
            )


@contextmanager
def eager(models: Mapping[str, Module]) -> Iterator[None]:
    """While in it, what vLLM would compile is run as it is."""
    compiled = [
        module
        for model in models.values()
        for module in model.modules()
        if getattr(module, "do_not_compile", None) is False
    ]
    for module in compiled:
        module.do_not_compile = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False  # type: ignore[assignment]
