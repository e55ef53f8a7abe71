"""The device memory of a stage: a workspace to load in, its weights, its KV cache."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from types import MappingProxyType

import torch
from torch.nn import Module

from swapd.shared import vm
from swapd.shared.protocol import Status
from swapd.shared.units import size
from swapd_client.client import Client
from swapd_client.errors import ClientClosed, InvalidSource, SessionEnded, TooLarge
from swapd_client.lease import Lease
from swapd_client.log import log
from swapd_client.memory.movable import is_wrapper, leaves
from swapd_client.offload.weights import ComponentWeights
from swapd_client.vllm import layers
from swapd_client.vllm.kept_content import Content
from swapd_client.vllm.options import Options
from swapd_client.vllm.parts import parts_of
from swapd_client.vllm.ranks import LossCounts
from swapd_client.vllm.stage.kv_cache import Busy, KvTerms
from swapd_client.vllm.stage.room import check_turn, lendable
from swapd_client.vllm.stage.turns import Turns

#: Seconds to wait until swapd has the workspace back, and between two checks.
RETURN_S = 10.0
RETURN_STEP_S = 0.02


class StageMemory:
    """Used by the thread that steps the engine."""

    def __init__(self, options: Options, turns: Turns) -> None:
        self._options = options
        self._turns = turns
        self._connection = turns.connection
        self._components = turns.components
        self._gate = turns.gate

    @contextmanager
    def loading(self, nbytes: int | None) -> Iterator[None]:
        """In the block, `nbytes` of device memory are this process's workspace; 0: nothing.

        None, or more than the daemon can lend, means as much as it can. Blocks until others have
        given way. Blocks at the end until swapd has the memory back: vLLM then reads the free
        memory of the GPU, and would count it.
        """
        if nbytes == 0:
            yield
            return
        with self._turns.in_order(waits=True):
            lease = self._workspace(nbytes)
        with lease:
            yield
        self._await_return()

    def take(
        self,
        models: Mapping[str, Module],
        outside: Mapping[str, torch.Tensor] = MappingProxyType({}),
        aliases: Iterable[torch.Tensor] = (),
        *,
        beside: int = 0,
        content: Content | None = None,
    ) -> int:
        """Move the weights into swapd; return the bytes moved.

        `models`, `outside`, `aliases`: as in `parts_of`. `beside`: the bytes of a KV cache that
        will be leased with the weights. `content`: as in `StageComponents.register`; unused if
        there are weights `outside`. Raises: InvalidArgument, TooLarge, and as
        `StageComponents.register`; then the models are unchanged.
        """
        client, stage = self._connection.client, self._connection.stage
        parts = parts_of(models, self._options, stage, outside, aliases)
        status = client.status()
        room = lendable(status) - vm.round_up(beside, status.chunk_bytes)
        if self._options.streams:
            layers.stream(parts, models, self._options, status.chunk_bytes, room)
        if not any(part.layers for part in parts):
            layers.divide(parts, models, status.chunk_bytes, room)
        try:
            moved = self._components.register(client, parts, None if outside else content)
        except TooLarge:  # of one component; this says what the stage can do
            held = chain.from_iterable(p.sources.values() for p in parts if not p.slots)
            check_turn(client, stage, map(layers.nbytes_of, held))
            raise
        try:
            check_turn(client, stage, self._components.sizes)
        except BaseException:
            self.take_back()
            raise
        passing, slots = self._components.streamed(models)
        if slots:
            self._turns.window.use(passing, slots)
        return moved

    def take_back(self) -> None:
        self._turns.renew_window()
        self._components.take_back(self._connection.client)

    def lend_cache(self, nbytes: int, terms: KvTerms) -> torch.Tensor:
        """As `StageComponents.lend_cache`; not in a call. Raises TooLarge if both do not fit."""
        client, stage = self._connection.client, self._connection.stage
        check_turn(client, stage, self._components.sizes, nbytes)
        with self._gate.lock:
            self._turns.end()
            self._turns.keeping.whole = not terms.saved
            ranks = self._connection.ranks
            counts = LossCounts() if ranks is None else ranks.loss_counts
            return self._components.lend_cache(client, f"{stage}.kv", nbytes, terms, counts)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """In the block the weights are private and may be written to; then swapd has the new ones.

        Their addresses in swapd do not change. Not in a step, nor in `using`. If the block raises,
        the weights are unchanged. Blocks until there is memory for a second copy, and until no
        other stage starts, which would measure the device meanwhile. Raises: Busy if requests are
        in flight whose cache would be dropped.
        """
        keeping = self._turns.keeping
        if keeping.whole and (requests := len(keeping.in_flight)):
            raise Busy(
                f"stage {self._connection.stage!r} has {requests} requests in flight, whose KV "
                "cache would be dropped: change its weights when they have finished, or set "
                "kv: auto"
            )
        with self._gate.changing(self._turns.end), ExitStack() as start:
            with self._turns.in_order(waits=True):
                workspace = self._begin_change(start)
            tensors = self._components.tensors
            if workspace is None:
                with _restored_on_error(tensors):
                    yield
                return
            with workspace, _written(self._connection.client, tensors, self._turns.go_alone):
                yield
            self._await_return()

    def _begin_change(self, start: ExitStack) -> Lease | None:
        """Take the turn to start, and a workspace for a second copy of the weights; None: swapd has
        none of them, or is gone. In the rank's turn, which others would fail with."""
        if not self._components.nbytes:
            return None
        if (error := self._connection.error) is None:
            try:
                start.enter_context(_no_other_starts(self._connection.client))
                return self._workspace(self._components.nbytes)
            except SessionEnded as exc:
                error = exc
        self._turns.go_alone(error)
        self._connection.refuse_stopped()
        return None

    def _workspace(self, nbytes: int | None) -> Lease:
        client, stage = self._connection.client, self._connection.stage
        most = lendable(client.status())
        nbytes = most if nbytes is None else min(nbytes, most)
        try:
            lease = client.acquire_workspace(nbytes)
        except TooLarge as exc:
            raise TooLarge(
                f"stage {stage!r} cannot have {size(nbytes)} to load its weights: {exc}. Give "
                "swapd a larger --budget, or the stage a smaller load_workspace"
            ) from exc
        log.info("%s loads, with a workspace of %s", stage, size(nbytes))
        return lease

    def _await_return(self) -> None:
        client, until = self._connection.client, time.monotonic() + RETURN_S
        mine = client.session.welcome.session
        with suppress(SessionEnded, ClientClosed):  # the next acquire reports it
            while _lends(status := client.status(), mine):
                if time.monotonic() > until:
                    log.warning(
                        "%s has loaded, but swapd has not got back the workspace for that: vLLM "
                        "may count it as free. %s",
                        self._connection.stage,
                        "; ".join(status.notes),
                    )
                    return
                self._connection.closed.wait(RETURN_STEP_S)


def _lends(status: Status, session: int) -> bool:
    return any(c.session == session and c.kind == "workspace" for c in status.components)


@contextmanager
def _no_other_starts(client: Client) -> Iterator[None]:
    """In the block no other stage starts, which would measure the device. Not with a lease.

    Blocks until running starts have ended. Raises as `Client.acquire_start`.
    """
    turn = client.acquire_start()
    try:
        yield
    finally:
        with suppress(SessionEnded, ClientClosed):  # the turn ended with the daemon
            turn.release()


# --- new weights ---------------------------------------------------------------------------


@contextmanager
def _written(
    client: Client,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    when_gone: Callable[[SessionEnded], None],
) -> Iterator[None]:
    """In the block the parameters may be written to; at its end, swapd has the new values.

    A component is read-only for its worker, and its addresses are in CUDA graphs. So the parameters
    point to private copies meanwhile, for which their device must have memory.

    If the block raises, or the new values do not fit, the old values stay. If the daemon is gone by
    then, `when_gone` must close the client, and the new values are in private memory. Raises:
    InvalidSource for a tensor that wraps others.
    """
    _refuse_wrappers(chain.from_iterable(tensors.items() for tensors in parts.values()))
    homes = [(t, t.data) for tensors in parts.values() for t in tensors.values()]
    owned = list(client.session.components.values())
    copies = ComponentWeights(client, "", owned).copies()
    try:
        for tensor, _ in homes:
            _point(tensor, copies.of(tensor).to(tensor.device))
        yield
        try:
            client._update_together(
                {part: {name: one.data for name, one in own.items()} for part, own in parts.items()}
            )
        except SessionEnded as exc:
            when_gone(exc)
            with torch.no_grad():
                for tensor, home in homes:
                    home.copy_(tensor.data)
    finally:
        for tensor, home in homes:
            _point(tensor, home)


@contextmanager
def _restored_on_error(parts: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[None]:
    """In the block the parameters, in private memory, may be written to in place.

    Needs host memory for all of them.
    """
    named = chain.from_iterable(tensors.items() for tensors in parts.values())
    mine = chain.from_iterable(leaves(*one) for one in named)
    before = [(one, one.data, one.data.to("cpu", copy=True)) for _, one in mine]
    try:
        yield
    except BaseException:
        for tensor, home, values in before:
            _point(tensor, home)
            with torch.inference_mode(home.is_inference()), torch.no_grad():
                home.copy_(values)
        raise


def _refuse_wrappers(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if is_wrapper(tensor):
            raise InvalidSource(
                f"{name!r} is a {type(tensor).__name__}, which wraps others: it cannot be "
                "reloaded in place. Start the stage again with the new weights"
            )


def _point(tensor: torch.Tensor, where: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = where
