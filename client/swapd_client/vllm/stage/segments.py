"""A turn begins with its first layers; each of the others is waited for before it computes.

Its lease is one, granted when all its copies are ordered: so who has begun waits for nobody's
lease, but for copies that come for certain, or fail. The copies come in order: what is in no layer
first, then layer by layer. A layer that is to wait has another `forward` until its part is there;
where all of it is, none has. A forward pre-hook would do the same, but torch's way through hooks
costs more than the wait.

Only where each layer's weights are used in that layer's own forward and nowhere else, and Python
runs that: a graph that is replayed, and what is compiled, call no `forward`. `found_in` looks at a
forward of the model. Does not import vLLM.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swapd_client.errors import ClientClosed, DeviceFailed, SessionEnded, SessionFenced, SwapdError
from swapd_client.lease import Lease
from swapd_client.offload.copies import start_of
from swapd_client.vllm.parts import Tensors

#: By name in the daemon, a part of a stage: its layers, and its weights.
Layers = Mapping[str, tuple[Sequence[Module], Tensors]]


class Segments:
    """Of one stage. It has none until `use`: then a turn begins when all of it is there."""

    def __init__(self, go_alone: Callable[[SwapdError], None]) -> None:
        """`go_alone`: what to do in a call when the daemon is gone; then all weights are there."""
        self._go_alone = go_alone
        self._layers: Mapping[str, Sequence[Module]] = {}
        self._lease: Lease | None = None
        #: Parts that were not all there when the turn began, or are not known to be.
        self._coming: list[str] = []
        #: Layers' parts that were waited for, and by which streams; () is by Python.
        self._waited: dict[str, tuple[int, ...]] = {}
        #: What has the layers of a part wait no more, by part.
        self._waiting: dict[str, Sequence[Callable[[], None]]] = {}
        #: Whether something did not come in: nothing may be computed under this lease any more.
        self.broken = False

    def __repr__(self) -> str:
        return f"<Segments: {len(self._coming)} of {len(self._layers)} parts to come>"

    def __bool__(self) -> bool:
        """Whether a turn may begin before all of it is there."""
        return bool(self._layers)

    def use(self, layers: Mapping[str, Sequence[Module]]) -> None:
        """These parts are waited for by their layers: as `found_in` says."""
        self._layers = layers

    def begin(self, lease: Lease) -> int:
        """A turn begins; returns how many parts are still to come, all of them layers'.

        Blocks until all else is there. Raises: DeviceFailed; what ended the session.
        """
        self.drop()
        self._lease = lease
        if not (self._layers and lease.loaded):
            return 0
        leases = lease._session.leases
        coming = [one.name for one in lease._placements if not leases.is_complete(one)]
        self._coming = coming
        for name in coming:
            if name not in self._layers:
                self._await(name)
        layers = [name for name in coming if name in self._layers]
        self._have_wait(layers)
        return len(layers)

    def _have_wait(self, parts: Iterable[str]) -> None:
        """Have the layers of these wait."""
        for name in parts:
            before = partial(self._before, name)
            self._waiting[name] = [_calling_first(layer, before) for layer in self._layers[name]]

    def _let_go(self, name: str) -> None:
        """Have the layers of this part wait no more."""
        for undo in self._waiting.pop(name, ()):
            undo()

    def arrive(self) -> None:
        """All of it is there; else wait. Where streams have waited, that it came is known now.

        In a call. Raises as `begin`, but for SessionEnded: then the stage has gone alone.
        """
        if not self._coming:
            return
        try:
            for name in self._coming:
                self._await(name, in_python=True)
        except (SessionEnded, ClientClosed) as exc:
            self._lose(exc)
        self.drop()

    def drop(self) -> None:
        """Wait for nothing more: the lease is over, or all of it is there."""
        for name in list(self._waiting):
            self._let_go(name)
        self._coming = []
        self._waited.clear()
        self._lease = None
        self.broken = False

    def _before(self, name: str) -> None:
        """A layer's forward begins."""
        try:
            self._await(name)
        except (SessionEnded, ClientClosed) as exc:
            self._lose(exc)
        if self._waited.get(name) == ():  # another stream need not wait, either
            self._let_go(name)

    def _await(self, name: str, *, in_python: bool = False) -> None:
        lease = self._lease
        if lease is None:
            return
        streams = () if in_python else lease._session.leases.current_streams()
        if self._waited.get(name) == streams:
            return
        try:
            for stream in streams:
                lease.wait(name=name, stream=stream)
            if not streams:
                lease.wait(name=name)
        except (DeviceFailed, SessionFenced):
            self.broken = True
            raise
        self._waited[name] = streams

    def _lose(self, error: SwapdError) -> None:
        """The daemon is gone. What had not come in is in the host copies, and comes from there."""
        if isinstance(error, SessionFenced):
            raise error
        self._go_alone(error)


def _calling_first(layer: Module, first: Callable[[], None]) -> Callable[[], None]:
    """Have a layer's forward begin with `first()`; what is returned undoes it.

    Where others have put a `forward` of theirs over it meanwhile, that stays, and calls `first`.
    """
    own, forward = layer.__dict__.get("forward"), layer.forward

    def waits(*args: Any, **kwargs: Any) -> Any:
        first()
        return forward(*args, **kwargs)

    def undo() -> None:
        if layer.__dict__.get("forward") is not waits:
            return
        if own is None:
            del layer.__dict__["forward"]
        else:
            layer.__dict__["forward"] = own

    layer.__dict__["forward"] = waits  # torch would look first whether it is a parameter
    return undo


def found_in(layers: Layers, forward: Callable[[], None]) -> dict[str, Sequence[Module]]:
    """Which parts may be waited for by their layers, as far as one `forward()` shows.

    Those whose layers ran, if no weights of any part were used before a layer of that had begun:
    else none. Under a lease of all of it.
    """
    owner: dict[int, str] = {}
    for name, (_, tensors) in layers.items():
        for tensor in tensors.values():
            if owner.setdefault(start_of(tensor), name) != name:
                return {}
    with _noted(layers) as began, _Uses(owner, began) as uses:
        forward()
    if uses.too_early:
        return {}
    return {name: modules for name, (modules, _) in layers.items() if name in began}


@contextmanager
def _noted(layers: Layers) -> Iterator[set[str]]:
    """Of which parts a layer has begun to compute."""
    began: set[str] = set()

    def note(name: str, layer: Module, args: Any) -> None:
        began.add(name)

    with ExitStack() as hooks:
        for name, (modules, _) in layers.items():
            for module in modules:
                hook = module.register_forward_pre_hook(partial(note, name), prepend=True)
                hooks.callback(hook.remove)
        yield began


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which parts' weights are used before a layer of theirs has begun."""

    def __init__(self, owner: Mapping[int, str], began: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._began = began
        self.too_early: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in self._tensors((args, kwargs)):
            name = self._owner.get(start_of(one))
            if name is not None and name not in self._began:
                self.too_early.add(name)
        return func(*args, **kwargs)

    @staticmethod
    def _tensors(given: Any) -> Iterable[torch.Tensor]:
        return (one for one in tree_leaves(given) if isinstance(one, torch.Tensor))
