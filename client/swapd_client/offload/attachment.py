"""A model attached to swapd: its components registered, and brought in around what uses them.

Lives here: the order in which that is done and undone. What a component is, is `find`'s; what
happens around a call `hooks`'s.
"""

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from types import TracebackType

import torch

from swapd.protocol import Policy
from swapd.units import size
from swapd_client.client import Client
from swapd_client.errors import ClientClosed, DuplicateName, InvalidSource, SwapdError
from swapd_client.offload import find, hooks
from swapd_client.offload.find import Found, Ownership
from swapd_client.offload.hooks import Gate
from swapd_client.offload.scope import Held, Leased, here

log = logging.getLogger("swapd_client")

#: What patches registration for the whole process (loaders do) must not see half of one here.
_ONE_AT_A_TIME = threading.Lock()
_numbers = itertools.count(1)

#: How deep below a component's root modules are called from outside.
DEPTH = 2


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
        names = list(dict.fromkeys(name for one in held for name in one.names))
        #: All are asked for at once: who takes one after the other may wait for who does not.
        self._all: Held | None = held[0] if len(held) == 1 else None
        if len(held) > 1:
            self._all = Leased(client, names)

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
        if exc is None:
            scope.leave(entry)
        else:
            with suppress(SwapdError):
                scope.leave(entry)


class Attachment:
    """What `Client.attach` made; `detach` undoes it, and so does the end of a `with` block."""

    def __init__(self, client: Client, roots: Mapping[str, torch.nn.Module], prefix: str) -> None:
        self.components: dict[str, Attached] = {}
        #: Whether nobody named its one component, and nothing was found.
        self.guessed = False
        self._client = client
        self._roots = dict(roots)
        self._prefix = prefix
        #: The component that is the whole model, if one is: it is called as the prefix is.
        self._whole: str | None = None
        #: Registered here, in this order.
        self._registered: list[str] = []
        #: Undoes everything that was done to modules.
        self._installed = ExitStack()
        #: By module: what is held by a call of it.
        self._gates: dict[int, Gate] = {}
        self._left_bytes = 0

    def __repr__(self) -> str:
        return f"<Attachment {self}>"

    def __str__(self) -> str:
        """What was found, and how big it is."""
        found = ", ".join(f"{c.name} ({size(c.nbytes)})" for c in self.components.values())
        left = f"; {size(self._left_bytes)} stay where they are" if self._left_bytes else ""
        why = "none of the usual names is there, so all of it is one component: "
        return f"{why if self.guessed else ''}{found or 'nothing'}{left}"

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
        held = [one for item in what for one in self._held_by(item)]
        return Use(self._client, list(dict.fromkeys(held)))

    def _held_by(self, what: str | torch.nn.Module) -> list[Leased]:
        if isinstance(what, str):
            names = {self._called(name): one for name, one in self.components.items()}
            one = self.components.get(what) or names.get(what)
            if one is None:
                raise InvalidSource(
                    f"no component is called {what!r}; there are: {', '.join(self.components)}"
                )
            return [one.held] if one.held is not None else []
        inner = {id(module) for module in what.modules()}
        found = [c.held for c in self.components.values() if id(c.module) in inner and c.held]
        if found or any(id(c.module) in inner for c in self.components.values()):
            return found
        for one in reversed(self.components.values()):  # an inner one comes after what it is in
            if any(module is what for module in one.module.modules()):
                return [one.held] if one.held is not None else []
        raise InvalidSource(f"this {type(what).__name__} is neither in a component nor around one")

    def _called(self, name: str) -> str:
        """A name of the model, as the daemon knows it."""
        if not self._prefix:
            return name
        return self._prefix if name == self._whole else f"{self._prefix}.{name}"

    # --- attaching -----------------------------------------------------------------------

    def register(
        self, found: Sequence[Found], owned: Ownership, policy: Policy, group: str | None
    ) -> None:
        """Move the weights into swapd: all components, or none."""
        client = self._client
        self._whole = next((one.name for one in found if one.whole), None)
        shared = {name for name in owned.pieces if name not in owned.made_of}
        try:
            for piece in owned.pieces.values():
                plain = piece.name in shared or self._is_nested(piece.name, found)
                client.register(
                    self._called(piece.name),
                    piece.tensors,
                    policy="lru" if plain and policy == "alternating" else policy,
                    group=None if plain else group,
                )
                self._registered.append(self._called(piece.name))
        except BaseException as exc:
            self._take_back()
            if isinstance(exc, DuplicateName):
                raise DuplicateName(
                    f"{exc}. Give this model's components names of their own: attach(..., "
                    "prefix=...)"
                ) from exc
            raise
        pieces = {name: self._called(name) for name in owned.pieces}
        for one in found:
            names = [pieces.get(name, name) for name in owned.made_of[one.name]]
            held = Leased(client, names) if names else None
            nbytes = sum(client.session.own(name).nbytes for name in names)
            self.components[one.name] = Attached(one.name, one.module, held, nbytes)
        self._left_bytes = owned.left_bytes

    def _is_nested(self, name: str, found: Sequence[Found]) -> bool:
        return any(
            name != other.name
            and (name.startswith(f"{other.name}.") or other.name.startswith(f"{name}."))
            for other in found
        )

    def install(
        self, owned: Ownership, wrap_methods: Mapping[str, Sequence[str]] | Sequence[str]
    ) -> None:
        """Put hooks where components are called from outside."""
        pieces = {name: self._called(name) for name in owned.pieces}
        for module, names in owned.outside.items():
            held = Leased(self._client, [pieces.get(name, name) for name in names])
            self._install(module, Gate("+".join(names), held, held, self._before))
        starts = {id(one.module) for one in self.components.values()}
        for one in self.components.values():
            if one.held is None:
                continue
            gate = Gate(one.name, one.held, one.held, self._before)
            gate.parameters = tuple(
                p
                for m in find.walk(one.module, starts)
                for p in m._parameters.values()
                if p is not None
            )
            for module in entrances(one.module, starts):
                self._install(module, gate)
            bare = find._bare(one.module)
            named = wrap_methods.get(one.name, ()) if isinstance(wrap_methods, Mapping) else ()
            for method in {*hooks.methods_of(bare), *named}:
                self._installed.callback(hooks.wrap(bare, method, gate))

    def _install(self, module: torch.nn.Module, gate: Gate) -> None:
        if id(module) not in self._gates:
            self._gates[id(module)] = gate
            self._installed.callback(hooks.install(module, gate))

    def _before(self) -> None:
        """A thread is about to hold a component."""

    # --- detaching -----------------------------------------------------------------------

    def detach(self) -> None:
        """Put everything back as it was: no hooks, and weights in ordinary private memory.

        Nothing of it may be in use. Done again it does nothing. Raises: ComponentInUse,
        DeviceMemoryExhausted, DaemonGone: then what is left is attached as before.
        """
        with _ONE_AT_A_TIME:
            try:
                self._take_back()
            except ClientClosed:  # all of it is private memory then
                self._registered.clear()
            self.let_go()

    def let_go(self) -> None:
        """Leave the modules alone: their weights are in private memory."""
        self._installed.close()
        self._gates.clear()

    def _take_back(self) -> None:
        while self._registered:
            name = self._registered[-1]
            self._client.unregister(name)
            self._registered.pop()
            for one in self.components.values():
                if one.held is not None and name in one.held.names:
                    one.held.names.remove(name)


def entrances(root: torch.nn.Module, starts: set[int]) -> list[torch.nn.Module]:
    """The modules of a component that are called from outside it.

    The root, its children and theirs, and embeddings at any depth; not what is in a list, which is
    called in turn, nor what is compiled into one with what is around it.
    """
    found = [root]
    waiting = [(root, 0)]
    while waiting:
        module, depth = waiting.pop()
        if "_orig_mod" in module._modules:
            continue
        for child in module._modules.values():
            if child is None or id(child) in starts:
                continue
            listed = isinstance(module, find.CONTAINERS)
            if isinstance(child, torch.nn.Embedding) or (
                depth < DEPTH and not listed and not isinstance(child, find.CONTAINERS)
            ):
                found.append(child)
            waiting.append((child, DEPTH if listed else depth + 1))
    return found


def attach(
    client: Client,
    model: object,
    components: str | Sequence[str] | None = None,
    *,
    prefix: str = "",
    policy: Policy = "lru",
    wrap_methods: Mapping[str, Sequence[str]] | Sequence[str] = (),
    extra_tensors: Sequence[str] = (),
) -> Attachment:
    """See `Client.attach`."""
    with _ONE_AT_A_TIME:
        roots = find.roots_of(model)
        find.refuse_hooked(roots)
        wanted = [components] if isinstance(components, str) else components
        found = find.components_of(roots, wanted)
        plain = find.plain_tensors(roots, found)
        extra = _extra(plain, extra_tensors)
        registered = {
            name: (part.address, part.address + part.nbytes)
            for name, part in client.session.components.items()
        }
        owned = find.own(roots, found, extra=extra, registered=registered)
        attachment = Attachment(client, roots, prefix)
        group = f"attach {client.session.welcome.session}.{next(_numbers)}"
        attachment.guessed = wanted is None and any(one.whole for one in found)
        attachment.register(found, owned, policy, group if policy == "alternating" else None)
        attachment.install(owned, wrap_methods)
    log.info("attached: %s", attachment)
    if plain.keys() - extra.keys():
        _warn_of_plain({n: t for n, t in plain.items() if n not in extra})
    return attachment


def _extra(plain: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    extra: dict[str, torch.Tensor] = {}
    for name in wanted:
        matches = {n: t for n, t in plain.items() if n == name or fnmatchcase(n, name)}
        if not matches:
            there = ", ".join(plain) or "none"
            raise InvalidSource(f"extra_tensors: nothing is called {name!r}; there are: {there}")
        extra.update(matches)
    return extra


def _warn_of_plain(plain: Mapping[str, torch.Tensor]) -> None:
    said = ", ".join(f"{name} ({size(tensor.nbytes)})" for name, tensor in plain.items())
    log.warning(
        "tensors that are neither parameters nor buffers stay in private memory: %s. "
        "extra_tensors= takes in those that never change",
        said,
    )
