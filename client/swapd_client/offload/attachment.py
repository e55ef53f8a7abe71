"""An attached model: its components, leases on them, edits of weights, `refresh` and `detach`."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch

from swapd.shared.system import process_lock
from swapd_client.checks import Uncopied
from swapd_client.errors import (
    ClientClosed,
    InUse,
    InvalidArgument,
    InvalidSource,
    SessionEnded,
    SwapdError,
    UnknownComponent,
)
from swapd_client.finalizers import await_given_back, when_collected
from swapd_client.log import log
from swapd_client.offload import growth, tools
from swapd_client.offload.guards import writable
from swapd_client.offload.holdables import AttachedComponent, StreamedComponent, Use
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.private import Trained
from swapd_client.offload.scope import Holdable, here
from swapd_client.offload.update_barrier import calls, quiet
from swapd_client.registration import refuse_in_use, unregister

#: Held while hooks are installed or removed: loaders that patch torch's registration for the whole
#: process must not see it half done.
ONE_AT_A_TIME = process_lock()


class Attachment(Uncopied, AbstractContextManager["Attachment"]):
    """The result of `Client.attach`. `detach`, or the end of a `with` block, undoes it."""

    def __init__(self, client: AttachClient, prefix: str) -> None:
        self.components: dict[str, AttachedComponent] = {}
        #: Names in the daemon that `detach` unregisters, in order of registration.
        self.registered: list[str] = []
        #: Collected with this attachment, or without hooks, with the last root module of the model.
        self.kept = threading.Event()
        self.streamed: dict[str, StreamedComponent] = {}
        self.trained: Trained = {}
        self.summary = ""
        #: Attaches the model as it is by then; None after `detach`.
        self._again: Callable[[], None] | None = None
        self._client = client
        self._prefix = prefix
        #: Remove hooks and guards, the last first. Each may be called twice, or before its hook is
        #: there.
        self._installed: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<Attachment {self.summary}>"

    def __str__(self) -> str:
        return self.summary

    def __exit__(self, *_: object) -> None:
        if not self._client.session.forked:  # else the model is attached in the parent
            self.detach()

    def use(self, *what: str | torch.nn.Module) -> Use:
        """Return a `with` block that holds components, for code that no hook sees.

        Needed for methods that are not wrapped, for backward, and for code that reads weights
        outside of forward.

        `what`: names of components, or modules. A name means the whole component; the prefix of
        `attach`, all components of the model. A module around components means all of each; a
        module inside a streamed component, the part that a call of it would hold. One acquire takes
        all. Entering the block raises the errors of `Client.acquire`.
        """
        whole: dict[str, AttachedComponent] = {}
        parts: dict[Holdable, None] = {}
        for item in what:
            found, part = self._meant_by(item)
            whole.update((one.name, one) for one in found if one.held is not None)
            if part is not None:
                parts[part] = None
        return Use(self._client, list(whole.values()), list(parts))

    def edit(self, *what: str | torch.nn.Module) -> AbstractContextManager[None]:
        """Return a `with` block in which any code may write to the weights in place.

        `what`: as for `use`; without it, all components. Within the block the tensors are over
        private copies: on the host only the written pages are copied, on a GPU all bytes. At its
        end, also after an exception, the copies become the new weights of all components at once,
        and leases of this thread are acquired again, with the new bytes. Other threads are treated
        as by `load_state_dict`.

        Shapes and types must not change: detach for that. Blocks and raises as `Client.update` and,
        to acquire again, as `Client.acquire`. Raises: NotWhileAttached, naming a tensor whose shape
        or type changed; that tensor keeps its old bytes.
        """
        self._client.session.life.check_process()
        modules: dict[torch.nn.Module, None] = {}
        for item in what or self.components:
            found, _ = self._meant_by(item)
            modules.update(dict.fromkeys(one.module for one in found))
            if not isinstance(item, str):
                modules[item] = None
        return writable(*modules)

    def _meant_by(
        self, what: str | torch.nn.Module
    ) -> tuple[list[AttachedComponent], Holdable | None]:
        if isinstance(what, str):
            return self._called(what), None
        if not isinstance(what, torch.nn.Module):
            raise InvalidArgument(
                f"{what!r} is neither the name of a component nor a module; give several as "
                "arguments of their own"
            )
        inside = set(what.modules())
        if within := [one for one in self.components.values() if one.module in inside]:
            return within, None
        return [], self._held_for(what)

    def _held_for(self, module: torch.nn.Module) -> Holdable | None:
        """Return what a call of a module inside a component holds."""
        around = [one for one in self.components.values() if module in set(one.module.modules())]
        if not around:
            raise InvalidSource(
                f"this {type(module).__name__} is neither in a component nor around one"
            )
        one = min(around, key=lambda one: len(list(one.module.modules())))  # the innermost
        blocks = (b for m, b in one.blocks.items() if module in set(m.modules()))
        return next(blocks, one.held)

    def _called(self, name: str) -> list[AttachedComponent]:
        short = name.removeprefix(f"{self._prefix}.") if self._prefix else name
        if (one := self.components.get(name) or self.components.get(short)) is not None:
            return [one]
        if name and name == self._prefix:  # the daemon's name of a whole model, too
            return list(self.components.values())
        there = ", ".join(self.components)
        raise InvalidSource(f"no component is called {name!r}; there are: {there}")

    def streams(self, name: str) -> bool:
        """Whether the family of this name is a streamed component of the model."""
        return any(name == streamed.stream.family for streamed in self.streamed.values())

    def between_passes(self, name: str) -> AbstractContextManager[None]:
        """Return a `with` block in which no other thread calls a module of this streamed family."""
        return quiet({self._client: self._client.session.registry.family(name)})

    def to_undo(self, undo: Callable[[], None]) -> None:
        """Have `detach` call `undo()`. Call this before the change: an interrupt may come first."""
        self._installed.appendleft(undo)

    def refresh(self) -> None:
        """Register parameters and modules that the model gained since it was attached.

        They become further components ("dit~2"); new blocks of a streamed component, parts of it
        ("dit/blocks.3~2"), which are streamed in their place. A component, or block, of which the
        model has lost all parameters becomes private memory, unless it is on a GPU: then it waits
        for `detach`. No component of the model may be in use. Blocks for the copies. Raises as
        `Client.attach`; then the new parameters stay private.
        """
        if calls(here(), {self._client: tuple(self._left())}):
            raise InUse(
                "refresh() within a call of the model would take what the call holds from it: call "
                "it before, or after"
            )
        await_given_back()
        with ONE_AT_A_TIME:
            if self._again is not None:
                try:
                    self._again()
                except SwapdError:
                    self.let_go_if_closed()  # then that is the error to report
                    raise
                except BaseException:
                    with suppress(ClientClosed):
                        self.let_go_if_closed()
                    raise
                self.let_go_if_closed()

    def detach(self) -> None:
        """Remove all hooks, and move the weights back into ordinary private memory.

        Components registered or loaded before `attach` stay registered, for use under a lease only.
        The log names them; `client.unregister` makes them private.

        Weights that attached models share are in a component of the model attached first. When that
        model is detached, they become private for all; `refresh` of another attachment registers
        them again. When another model is detached, its hooks stay, and acquire that component,
        until the first is detached too.

        No component of the model may be in use. A call of a model that shares weights waits while
        they are moved. A second call does nothing. If the daemon is gone, the client first joins
        the next one. Raises: InUse, OutOfMemory, SessionEnded, NotRunning: then the remaining
        components are still attached; ClientClosed in a forked child, which has no weights.
        """
        self._client.session.life.check_process()
        await_given_back()  # garbage that the caller dropped is not in use
        try:
            self._detach()
        except SessionEnded as exc:
            self._client._join_next(exc)
            self._detach()

    def _detach(self) -> None:
        with suppress(ClientClosed):
            refuse_in_use(self._client.leasing, self.registered)  # before anything is undone
        with quiet({self._client: tuple(self.registered)}), ONE_AT_A_TIME:
            with suppress(ClientClosed):  # then all of it is private already
                self._take_back()
            self._end()

    def _end(self) -> None:
        others = [one for one in self._client.attachments if one is not self]
        lent = {name for one in others for name in one.registered}
        left = self._left()
        if lent.isdisjoint(left):
            self._tell_of_the_rest(left)
            self.let_go()
        else:
            self._again, self.trained = None, {}
            log.info(
                "detached; its calls still acquire %s, of another model with which it shares "
                "weights, until that is detached too",
                ", ".join(left),
            )
        for one in others:
            if one.is_detached and not one._left():
                one.let_go()

    @property
    def is_detached(self) -> bool:
        """True after `detach`, even if hooks stay for weights of other models."""
        return self._again is None

    def _left(self) -> list[str]:
        used = (one.all_of_it.registered() for one in self.components.values())
        return list(dict.fromkeys(name for names in used for name in names))

    def _tell_of_the_rest(self, names: Sequence[str]) -> None:
        if names and not self.is_detached:
            log.warning(
                "detached; still registered, as before attach, and to be used under a lease only: "
                "%s. client.unregister moves them to private memory",
                ", ".join(names),
            )

    def take_back_lost(self) -> None:
        """Unregister what no module has any more: it may still be called, and has no hooks."""
        if self._client.session.processor.memory_is_scarce:
            return
        used = {name for one in self._client.attachments for name in one._needed()}
        for name in set(self.registered) - used - self._needed():
            with suppress(InUse):  # it waits for the next time
                if name in self._client.session.components:  # else by hand, or before an interrupt
                    unregister(self._client.leasing, name)
                self.registered.remove(name)

    def _needed(self) -> set[str]:
        streamed = (name for one in self.streamed.values() for name in one.stream.everything)
        return {*self._left(), *streamed}

    def _take_back(self) -> None:
        while self.registered:
            name = self.registered[-1]
            if name in self._client.session.components:
                unregister(self._client.leasing, name)
            self.registered.pop()

    def let_go(self) -> None:
        self._again, self.trained = None, {}
        self._uninstall()
        self._client.attachments.discard(self)

    def let_go_if_closed(self) -> None:
        """Remove hooks that were installed while another thread closed the client, and raise."""
        if isinstance(self._client.session.error, ClientClosed):
            self.let_go()
            self._client.session.check()

    def _uninstall(self) -> None:
        while self._installed:
            with suppress(IndexError, ValueError):  # another thread, which closes, does the same
                undo = self._installed[0]
                undo()
                self._installed.remove(undo)


def take_back_if_dropped(client: AttachClient, attachment: Attachment) -> None:
    """Unregister an attachment's components when it is collected without `detach`.

    Only hooks keep an attachment alive, so it is collected with its model. On a GPU the components
    stay registered, and the log says so: private memory would stay for the life of the process,
    since queued work may still read it, whereas the daemon can evict a component.
    """
    work = partial(_take_back_all, client, attachment.registered)
    when_collected(attachment.kept, client.session, work)


def _take_back_all(client: AttachClient, names: list[str]) -> None:
    if names:  # else it was detached
        while names:
            _take_back(client, names.pop())
        growth.rest()
        tools.rest()


def _take_back(client: AttachClient, name: str) -> None:
    if client.session.processor.memory_is_scarce and client.session.error is None:
        log.warning(
            "%r stays registered, though its model is no more: swapd evicts it when others need "
            "the memory, and frees the host copy when the client closes. detach() a model before "
            "you drop it",
            name,
        )
        return
    try:  # calls of other models may use its weights: `quiet` waits for them
        with suppress(UnknownComponent), quiet({client: [name]}):
            unregister(client.leasing, name)
    except SwapdError as exc:
        if client.session.error is None:  # else no component is registered any more
            log.warning(
                "%r stays registered, though its model is no more: %s. client.unregister(%r) "
                "makes it private",
                name,
                exc,
                name,
            )
