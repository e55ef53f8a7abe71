"""A model that is attached to swapd: its components, how to hold them, and the way back.

How it is made is in `attaching.py`; what happens around a call in `hooks.py`.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

import torch

from swapd.units import size
from swapd_client.client import Client
from swapd_client.errors import ClientClosed, InvalidSource, SwapdError
from swapd_client.offload.scope import Held, Leased, here

#: What patches registration for the whole process (loaders do) must not see half of one here.
ONE_AT_A_TIME = threading.Lock()


class Attached:
    """One component of an attachment."""

    def __init__(self, name: str, module: torch.nn.Module, held: Leased | None, nbytes: int):
        self.name = name
        self.module = module
        #: None if there is nothing to hold: it has no parameters.
        self.held = held
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<Attached {self.name} {size(self.nbytes)}>"


class Use:
    """A `with` block in which components are in; may be nested, and used more than once."""

    def __init__(self, client: Client, held: Sequence[Leased]) -> None:
        self._parts = tuple(held)
        #: All are asked for at once: who takes one after the other may wait for who does not.
        self._all: Held | None = None
        if held:
            names = dict.fromkeys(name for one in held for name in one.names)
            self._all = held[0] if len(held) == 1 else Leased(client, list(names))

    def __enter__(self) -> None:
        scope = here()
        scope.reap()
        if self._all is not None:
            scope.enter(self._all, None, self)
            for one in self._parts:
                scope.lend(one)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        scope = here()
        entry = scope.find(None, self)
        if entry is None:
            return
        for one in self._parts:
            scope.count_down(one)
        try:
            scope.leave(entry)
        except SwapdError:
            if exc is None:  # else what went wrong first is what to say
                raise


class Attachment:
    """What `Client.attach` made; `detach` undoes it, and so does the end of a `with` block."""

    def __init__(self, client: Client, prefix: str) -> None:
        self.components: dict[str, Attached] = {}
        #: In order of registration, as the daemon calls it: what `detach` unregisters.
        self.registered: list[str] = []
        #: What it says of itself, in a line.
        self.summary = ""
        #: Attaches the model again, as it is now, to what is registered and to what is not yet.
        self.again: Callable[[], None] = _nothing
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

        `what`: names of components, or modules: in one, or with some in them. For weights that are
        read outside of forward, methods that are not wrapped, and backward. All are brought in
        together, or none. Raises, when it is entered, as `Client.acquire`.
        """
        held = [one.held for item in what for one in self._meant_by(item) if one.held is not None]
        return Use(self._client, list(dict.fromkeys(held)))

    def _meant_by(self, what: str | torch.nn.Module) -> list[Attached]:
        if isinstance(what, str):
            name = what.removeprefix(f"{self._prefix}.") if self._prefix else what
            if (one := self.components.get(what) or self.components.get(name)) is None:
                there = ", ".join(self.components)
                raise InvalidSource(f"no component is called {what!r}; there are: {there}")
            return [one]
        inside = set(what.modules())
        if within := [one for one in self.components.values() if one.module in inside]:
            return within
        around = [one for one in self.components.values() if what in set(one.module.modules())]
        if not around:
            raise InvalidSource(
                f"this {type(what).__name__} is neither in a component nor around one"
            )
        return [min(around, key=lambda one: len(list(one.module.modules())))]  # the innermost

    def to_undo(self, undo: Callable[[], None]) -> None:
        """Something was done to a module; `undo()` is called when it is detached."""
        self._installed.callback(undo)

    def refresh(self) -> None:
        """Take in what came into the model since: new parameters, replaced children.

        They are registered beside what is there ("dit~2"). Nothing of it may be in use. Blocks for
        the copies. Raises as `Client.attach`; then the new ones stay private.
        """
        with ONE_AT_A_TIME:
            self.again()

    def detach(self) -> None:
        """Put everything back as it was: no hooks, and weights in ordinary private memory.

        Nothing of it may be in use. Done again it does nothing. Raises: ComponentInUse,
        DeviceMemoryExhausted, DaemonGone: then what is left is attached as before.
        """
        with ONE_AT_A_TIME:
            with suppress(ClientClosed):  # then all of it is private memory
                self.take_back()
            self.let_go()

    def take_back(self) -> None:
        """Have the weights in private memory; what is not there yet is still held by calls."""
        self.take_back_to(0)

    def take_back_to(self, count: int) -> None:
        """The same, but for the first `count`."""
        while len(self.registered) > count:
            name = self.registered[-1]
            self._client.unregister(name)
            self.registered.pop()
            for one in self.components.values():
                if one.held is not None and name in one.held.names:
                    one.held.names.remove(name)

    def let_go(self) -> None:
        """Leave the modules alone: their weights are in private memory."""
        self.registered.clear()
        self.again = _nothing
        self.uninstall()

    def uninstall(self) -> None:
        """Leave the modules alone for now."""
        self._installed.close()


def _nothing() -> None:
    pass
