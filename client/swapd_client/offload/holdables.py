"""What a thread can hold of a streamed component: a pass through it, or one block of it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from swapd_client.lease import Lease
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.scope import ComponentHold, Entry, Scope
from swapd_client.offload.stream import Stream

if TYPE_CHECKING:
    from swapd_client.offload.hooks import BlockHooks


@dataclass(eq=False)
class PassHold:
    """A streamed component: the tensors outside its blocks, for one pass through the blocks."""

    is_lease = False
    stream: Stream
    #: Its components outside the stream.
    beside: ComponentHold | None
    #: All of it.
    everything: ComponentHold
    #: The hooks of its blocks.
    hooks: "BlockHooks"
    uses: set[Entry] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"<PassHold {self.stream.family}>"

    @property
    def client(self) -> AttachClient:
        return self.stream.client

    def take(self, scope: Scope) -> Callable[[], None]:
        beside = _nothing if self.beside is None else self.beside.take(scope)
        try:
            lease = self.stream.whole()
            by_block = lease is None and not self.stream.is_private
            if by_block:
                self.stream.enter()
        except BaseException:
            beside()
            raise
        if by_block:
            self.hooks.begin(whole=False)
            return partial(self._leave, beside)
        scope.lend(self.everything)  # then its blocks need no lease
        whole = not torch.is_grad_enabled()  # in grad mode the hooks check each forward
        self.hooks.begin(whole=whole)
        return partial(self._leave_whole, scope, lease, beside, whole)

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool:
        return self.everything.has_any(client, names)

    def _leave(self, beside: Callable[[], None]) -> None:
        self.hooks.end(whole=False)
        try:
            self.stream.leave()
        finally:
            beside()

    def _leave_whole(
        self, scope: Scope, lease: Lease | None, beside: Callable[[], None], whole: bool
    ) -> None:
        self.hooks.end(whole=whole)
        scope.count_down(self.everything)
        try:
            if lease is not None:
                lease.release()
        finally:
            beside()


class BlockHold:
    """One block of a streamed component, and the component's pass."""

    is_lease = False

    def __init__(self, whole: PassHold, number: int | None) -> None:
        """`number`: of the block; None: a layer outside the blocks, which needs `whole` only."""
        self.uses: set[Entry] = set()
        self.client = whole.client
        self._whole = whole
        self._number = number
        #: The component that it holds beside the pass.
        self.names = () if number is None else (whole.stream.parts[number],)

    def __repr__(self) -> str:
        what = "a layer" if self._number is None else f"block {self._number}"
        return f"<BlockHold {what} of {self._whole}>"

    def take(self, scope: Scope) -> Callable[[], None]:
        whole, number = self._whole, self._number
        # its hooks called it and will leave it, so they stay installed in any case
        whole.hooks.begin(whole=False)
        try:
            scope.count_up(whole)
            try:
                if whole.everything in scope:
                    number = None
                if number is not None:
                    whole.stream.need(number)
            except BaseException:
                scope.count_down(whole)
                raise
        except BaseException:
            whole.hooks.end(whole=False)
            raise
        return partial(self._leave, scope, number)

    def _leave(self, scope: Scope, number: int | None) -> None:
        whole = self._whole
        try:
            if number is not None:
                whole.stream.done(number)
        finally:
            try:
                scope.count_down(whole)
            finally:
                whole.hooks.end(whole=False)

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool:
        return self._whole.has_any(client, names)


def _nothing() -> None:
    pass
