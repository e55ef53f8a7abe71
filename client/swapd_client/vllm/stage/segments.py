"""Lets a turn begin before all layers are loaded: each layer waits for its own weights.

The turn has one lease, granted when all its copies are queued: first tensors outside of layers,
then layer by layer. So a running turn waits for no lease, but for copies that will arrive, or fail.
A layer has another `forward` while it may have to wait. A forward pre-hook would do the same, but
torch's dispatch of hooks costs more than the wait.

This requires that a layer's weights are used in its own forward only, and that Python runs it:
replayed graphs and compiled code call no `forward`. `found_in` checks that in one forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swapd.shared.protocol import Placement
from swapd_client.errors import ClientClosed, DeviceFailed, SessionEnded, SessionFenced, SwapdError
from swapd_client.lease import Lease
from swapd_client.offload.copies import put_back, start_of
from swapd_client.session.session import Session
from swapd_client.vllm.parts import Tensors

#: Layers and weights of parts, by name in the daemon.
Layers = Mapping[str, tuple[Sequence[Module], Tensors]]


class Segments:
    """Without `use`, a turn begins when all parts have arrived."""

    def __init__(self, go_alone: Callable[[SwapdError], None]) -> None:
        """`go_alone`: called in a call when the daemon is gone; then all weights are in memory."""
        self._go_alone = go_alone
        self._layers: Mapping[str, Sequence[Module]] = {}
        self._lease: Lease | None = None
        self._session: Session | None = None
        #: Parts that had not arrived when the turn began, the last of them first.
        self._coming: dict[str, Placement] = {}
        #: Parts already waited for, and the streams that waited; (): Python waited.
        self._waited: dict[str, tuple[int, ...]] = {}
        #: By part, functions that restore the `forward` of its layers.
        self._waiting: dict[str, Sequence[Callable[[], None]]] = {}
        #: Whether a part failed to load: no further computation is valid under this lease.
        self.broken = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    def use(self, layers: Mapping[str, Sequence[Module]]) -> None:
        self._layers = layers

    def begin(self, lease: Lease, session: Session) -> int:
        """Begin a turn with a lease of this session; return the number of parts still to come.

        Blocks until all parts but those of layers have arrived. Raises: DeviceFailed; the error
        that ended the session.
        """
        self.drop()
        self._lease, self._session = lease, session
        if not (self._layers and lease.loaded):
            return 0
        coming = [one for one in lease.placements if not session.arrivals.is_complete(one)]
        self.expect(coming)
        for one in lease.placements:
            if one.name not in self._waiting:
                self._await(one.name)
        return len(self._waiting)

    def expect(self, coming: Sequence[Placement]) -> None:
        self._coming = {one.name: one for one in reversed(coming)}
        for one in coming:
            if layers := self._layers.get(one.name):
                before = partial(self._before, one.name)
                self._waiting[one.name] = [_calling_first(layer, before) for layer in layers]

    def _let_go(self, name: str) -> None:
        for undo in self._waiting.pop(name, ()):
            undo()

    def arrive(self) -> None:
        """Wait until all parts have arrived; where streams have waited, check the outcome.

        In a call, after the layers have computed. Raises as `begin`, but goes alone if the session
        ended without a fence.
        """
        if not self._coming:
            return
        try:
            for name in reversed(self._coming):
                self._await(name, in_python=True)
        except (SessionEnded, ClientClosed) as exc:
            self._lose(exc)
        self.drop()

    def drop(self) -> None:
        """Stop all waits: the lease is over, or all parts have arrived."""
        for name in list(self._waiting):
            self._let_go(name)
        self._coming = {}
        self._waited.clear()
        self._lease = self._session = None
        self.broken = False

    def _before(self, name: str) -> None:
        session = self._session
        if session is not None and all(map(session.arrivals.is_complete, self._coming.values())):
            self.arrive()  # no stream has to wait any more
            return
        try:
            self._await(name)
        except (SessionEnded, ClientClosed) as exc:
            self._lose(exc)
        if self._waited.get(name) == ():  # arrived for all streams
            self._let_go(name)

    def _await(self, name: str, *, in_python: bool = False) -> None:
        lease, session = self._lease, self._session
        if lease is None or session is None:
            return
        streams = () if in_python else session.processor.current_streams()
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
        """Go alone: parts that had not arrived are in the host copies. Raises SessionFenced."""
        if isinstance(error, SessionFenced):
            raise error
        self._go_alone(error)


def _calling_first(layer: Module, first: Callable[[], None]) -> Callable[[], None]:
    """Make a layer's forward begin with `first()`; return a function that undoes it.

    If another `forward` was set on top meanwhile, that one stays, and calls `first`.
    """
    own, forward = layer.__dict__.get("forward"), layer.forward

    def waits(*args: Any, **kwargs: Any) -> Any:
        first()
        return forward(*args, **kwargs)

    def undo() -> None:
        if layer.__dict__.get("forward") is waits:
            put_back(layer.__dict__, "forward", own)

    layer.__dict__["forward"] = waits  # setattr would first check for parameters
    return undo


def found_in(layers: Layers, forward: Callable[[], None]) -> dict[str, Sequence[Module]]:
    """Return the parts whose layers may wait for them, as far as one `forward()` shows.

    These are the parts whose layers ran outside of compiled code; none, if weights of any part were
    used before one of its layers had begun. Call it under a lease of all parts, in `eager`.
    """
    owner: dict[int, str] = {}
    for name, (_, tensors) in layers.items():
        for tensor in tensors.values():
            if owner.setdefault(start_of(tensor), name) != name:
                return {}
    with _noted(layers) as (began, compiled), _Uses(owner, began) as uses:
        forward()
    if uses.too_early:
        return {}
    return {name: modules for name, (modules, _) in layers.items() if name in began - compiled}


@contextmanager
def _noted(layers: Layers) -> Iterator[tuple[set[str], set[str]]]:
    began: set[str] = set()
    compiled: set[str] = set()

    def note(name: str, layer: Module, args: Any) -> None:
        began.add(name)
        if _in_compiled_code():
            compiled.add(name)

    with ExitStack() as hooks:
        for name, (modules, _) in layers.items():
            for module in modules:
                hook = module.register_forward_pre_hook(partial(note, name), prepend=True)
                hooks.callback(hook.remove)
        yield began, compiled


def _in_compiled_code() -> bool:
    """The wrapper of `torch.compile` stays in `eager`."""
    wrapper = torch._dynamo.eval_frame.__name__
    return any(frame.f_globals.get("__name__") == wrapper for frame, _ in walk_stack(None))


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: Mapping[int, str], began: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._began = began
        self.too_early: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in tree_leaves((args, kwargs)):
            name = self._owner.get(start_of(one)) if isinstance(one, torch.Tensor) else None
            if name is not None and name not in self._began:
                self.too_early.add(name)
        return func(*args, **kwargs)
