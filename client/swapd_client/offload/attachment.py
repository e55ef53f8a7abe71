"""A model that is attached to swapd: its components, how to hold them, and the way back.

How it is made is in `attaching.py`; what happens around a call in `hooks.py`.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from types import TracebackType

import torch

from swapd.shared.units import size
from swapd_client.errors import ClientClosed, InvalidSource, SessionEnded, SwapdError
from swapd_client.lease import Lender
from swapd_client.offload.changing import quiet
from swapd_client.offload.collected import await_given_back
from swapd_client.offload.guards import writable
from swapd_client.offload.registering import Streamed
from swapd_client.offload.scope import Block, Holdable, Leased, Passed, here
from swapd_client.offload.training import Trained

log = logging.getLogger("swapd_client")

#: What patches registration for the whole process (loaders do) must not see half of one here.
ONE_AT_A_TIME = threading.Lock()


_counting = threading.Lock()


class Attached:
    """One component of an attachment."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        held: Leased | Passed | None,
        all_of_it: Leased,
        nbytes: int,
    ) -> None:
        self.name = name
        self.module = module
        #: By a call of it. None if there is nothing to hold: it has no parameters.
        self.held = held
        #: The same, unless it is streamed.
        self.all_of_it = all_of_it
        self.nbytes = nbytes
        #: If it is streamed, the blocks by module.
        self.blocks: dict[torch.nn.Module, Block] = {}

    def __repr__(self) -> str:
        return f"<Attached {self.name} {size(self.nbytes)}>"


class Use:
    """A `with` block in which components are in; may be nested, and used more than once."""

    def __init__(
        self, client: Lender, all_of: Sequence[Attached], parts: Sequence[Holdable]
    ) -> None:
        """`all_of` these components, and of others those `parts` that a call would hold."""
        names = dict.fromkeys(name for one in all_of for name in one.all_of_it.names)
        #: All are asked for at once: who takes one after the other may wait for who does not.
        self._taken: list[Holdable] = list(parts)
        if len(all_of) == 1:
            self._taken.insert(0, all_of[0].all_of_it)
        elif all_of:
            self._taken.insert(0, Leased(client, list(names)))
        #: What calls hold, and need not take any more.
        self._lent = [one.held for one in all_of if one.held is not None]
        self._lent += [one.all_of_it for one in all_of]

    def __enter__(self) -> None:
        scope = here()
        scope.reap()
        with ExitStack() as undo:
            for held in self._taken:
                scope.enter(held, None, self, is_call=False)
                undo.callback(self._leave_last)
            undo.pop_all()
        for held in self._lent:
            scope.lend(held)
        with _counting:
            for held in self._lent:
                held.uses += 1

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with _counting:
            for held in self._lent:
                held.uses -= 1
        for held in self._lent:
            here().count_down(held)
        try:
            with ExitStack() as stack:
                for _ in self._taken:
                    stack.callback(self._leave_last)
        except SwapdError:
            if exc is None:  # else what went wrong first is what to say
                raise

    def _leave_last(self) -> None:
        scope = here()
        if entry := scope.find(self):
            scope.leave(entry)


class Attachment:
    """What `Client.attach` made; `detach` undoes it, and so does the end of a `with` block."""

    def __init__(self, client: Lender, prefix: str) -> None:
        self.components: dict[str, Attached] = {}
        #: In order of registration, as the daemon calls it: what `detach` unregisters.
        self.registered: list[str] = []
        #: By component, those that are streamed.
        self.streamed: dict[str, Streamed] = {}
        #: Parameters that stay private.
        self.trained: Trained = {}
        #: What it says of itself, in a line.
        self.summary = ""
        #: Attaches the model again, as it is now, to what is registered and to what is not yet.
        self._again: Callable[[], None] = _nothing
        #: Called by a component's call that finds the daemon gone: it is to let go of all of this
        #: (`Client.close`), and the call then goes on. None: the call raises.
        self._when_gone: Callable[[SessionEnded], None] | None = None
        self._client = client
        self._prefix = prefix
        #: Undoes what was done to modules.
        self._installed = ExitStack()

    def __repr__(self) -> str:
        return f"<Attachment {self.summary}>"

    def __str__(self) -> str:
        return self.summary

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.detach()

    def use(self, *what: str | torch.nn.Module) -> Use:
        """A `with` block in which components are in, for what no hook sees.

        `what`: names of components, or modules. A component, or what has some in it, stands for
        all of each; a module inside a component that is streamed, for as much as a call of it
        brings in. For weights that are read outside of forward, methods that are not wrapped, and
        backward. All are brought in together, or none. Raises, when it is entered, as
        `Client.acquire`.
        """
        whole: dict[str, Attached] = {}
        parts: dict[Holdable, None] = {}
        for item in what:
            found, part = self._meant_by(item)
            whole.update((one.name, one) for one in found if one.held is not None)
            if part is not None:
                parts[part] = None
        return Use(self._client, list(whole.values()), list(parts))

    def edit(self, *what: str | torch.nn.Module) -> AbstractContextManager[None]:
        """A `with` block in which weights may be written to: by anything, wherever they are.

        `what`: as for `use`; without it, all components. Until its end the tensors are over private
        copies, in host memory the pages that are written to, on a GPU all of it. Then what was
        written is the weights' new value, of all components at once, also if the block raises; what
        this thread holds it holds anew. What `load_state_dict` says of other threads holds here.

        Nothing may be replaced by other shapes or types: detach for that. Blocks, and raises, as
        `Client.update` and, for what is held, as an acquire; NotWhileAttached, naming the tensor
        that got another shape, which is as it was.
        """
        modules: dict[torch.nn.Module, None] = {}
        for item in what or self.components:
            found, _ = self._meant_by(item)
            modules.update(dict.fromkeys(one.module for one in found))
            if not isinstance(item, str):
                modules[item] = None
        return writable(*modules)

    def _meant_by(self, what: str | torch.nn.Module) -> tuple[list[Attached], Holdable | None]:
        """Components of which all is meant; or what a call of a module in one would hold."""
        if isinstance(what, str):
            name = what.removeprefix(f"{self._prefix}.") if self._prefix else what
            if (one := self.components.get(what) or self.components.get(name)) is None:
                there = ", ".join(self.components)
                raise InvalidSource(f"no component is called {what!r}; there are: {there}")
            return [one], None
        inside = set(what.modules())
        if within := [one for one in self.components.values() if one.module in inside]:
            return within, None
        around = [one for one in self.components.values() if what in set(one.module.modules())]
        if not around:
            raise InvalidSource(
                f"this {type(what).__name__} is neither in a component nor around one"
            )
        one = min(around, key=lambda one: len(list(one.module.modules())))  # the innermost
        blocks = (b for m, b in one.blocks.items() if what in set(m.modules()))
        return [], next(blocks, one.held)

    def _between_passes(self, name: str) -> AbstractContextManager[None]:
        """A `with` block in which no call passes through a family, in any other thread."""
        if all(name != streamed.stream.family for streamed in self.streamed.values()):
            return nullcontext()
        return quiet({self._client: self._client.session.registry.family(name)})

    def _daemon_gone(self, error: SessionEnded) -> None:
        """A call finds the daemon gone. Raises `error` unless somebody sees to it."""
        if self._when_gone is None:
            raise error
        self._when_gone(error)

    def _to_undo(self, undo: Callable[[], None]) -> None:
        """Something was done to a module; `undo()` is called when it is detached."""
        self._installed.callback(undo)

    def refresh(self) -> None:
        """Take in what came into the model since: new parameters, replaced children.

        They are registered beside what is there ("dit~2"). Nothing of it may be in use. Blocks for
        the copies. Raises as `Client.attach`; then the new ones stay private.
        """
        await_given_back()
        with ONE_AT_A_TIME:
            self._again()

    def detach(self) -> None:
        """Put everything back as it was: no hooks, and weights in ordinary private memory.

        What was registered, or loaded, before it was attached is so afterwards, and may be touched
        under a lease only: the log names it, `client.unregister` takes it back.

        Nothing of it may be in use. Done again it does nothing. Raises: ComponentInUse,
        DeviceMemoryExhausted, SessionEnded: then what is left is attached as before.
        """
        await_given_back()  # what the caller let go of is not in use
        with ONE_AT_A_TIME:
            with suppress(ClientClosed):  # then all of it is private memory
                self._client._refuse_in_use(self.registered)  # while all of it can go on
                self._take_back()
                self._tell_of_the_rest()
            self._let_go()

    def _tell_of_the_rest(self) -> None:
        names = {name: None for one in self.components.values() for name in one.all_of_it.names}
        if names and self._again is not _nothing:
            log.warning(
                "detached, and registered as before, to be touched under a lease only: %s. "
                "client.unregister takes it back",
                ", ".join(names),
            )

    def _take_back(self) -> None:
        """Have the weights in private memory; what is not there yet is still held by calls."""
        while self.registered:
            name = self.registered[-1]
            if name in self._client.session.components:  # else somebody did
                self._client.unregister(name)
            self.registered.pop()
            for one in self.components.values():
                if name in one.all_of_it.names:
                    one.all_of_it.names.remove(name)

    def _let_go(self) -> None:
        """Leave the modules alone: their weights are in private memory."""
        self.registered.clear()
        self.trained = {}
        self._again = _nothing
        self._uninstall()
        self._client._forget(self)

    def _uninstall(self) -> None:
        """Leave the modules alone for now."""
        self._installed.close()


def _nothing() -> None:
    pass
