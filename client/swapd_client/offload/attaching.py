"""How a model is attached: find, say how, register, install. All of it, or nothing."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from swapd.units import size
from swapd_client.client import Client
from swapd_client.errors import DuplicateName, InvalidSource
from swapd_client.offload import find, growth, hooks, settings, strategy
from swapd_client.offload.attachment import ONE_AT_A_TIME, Attached, Attachment
from swapd_client.offload.find import Found, Part, Piece
from swapd_client.offload.growth import Growth
from swapd_client.offload.hooks import Gate
from swapd_client.offload.scope import Leased
from swapd_client.offload.settings import OffloadSettings
from swapd_client.offload.strategy import How

log = logging.getLogger("swapd_client")

#: How deep below a component's root modules are called from outside.
DEPTH = 2

_numbers = itertools.count(1)

Methods = Mapping[str, Sequence[str]] | Sequence[str]


def attach(
    client: Client,
    model: object,
    components: str | Sequence[str] | None,
    *,
    prefix: str,
    given: OffloadSettings | None,
    flags: Mapping[str, Any],
    how: How,
    wrap_methods: Methods,
    extra_tensors: Sequence[str],
) -> Attachment:
    """See `Client.attach`. `how`: unless settings are `given`, or some of their `flags`."""
    chosen = _chosen(given, flags)
    if components is None and chosen is not None:
        components = chosen.cpu_offload_components
    wanted = [components] if isinstance(components, str) else components
    attachment = Attachment(client, prefix)

    def run() -> None:
        attaching = _Attaching(client, model, wanted, prefix, extra_tensors)
        attaching.run(attachment, chosen, how, wrap_methods)

    with ONE_AT_A_TIME:
        try:
            run()
        except BaseException:
            attachment.uninstall()
            attachment.take_back_to(0)
            raise
        attachment.again = run
    return attachment


def _chosen(given: OffloadSettings | None, flags: Mapping[str, Any]) -> OffloadSettings | None:
    if not flags:
        return given
    if given is not None:
        raise settings.InvalidSettings(
            f"settings= and {', '.join(flags)}: give them all in one or the other"
        )
    return settings.from_keywords(**flags)


class _Attaching:
    """One call of `attach`, or of `refresh`: then much of it is registered already."""

    def __init__(
        self,
        client: Client,
        model: object,
        wanted: Sequence[str] | None,
        prefix: str,
        extra_tensors: Sequence[str],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._roots = find.roots_of(model)
        find.refuse_hooked(self._roots)
        self._found = find.components_of(self._roots, wanted)
        #: Whether nobody named its one component, and none was found.
        self._guessed = wanted is None and any(one.whole for one in self._found)
        self._whole = next((one.name for one in self._found if one.whole), None)
        plain = find.plain_tensors(self._roots, self._found)
        extra = _extra(plain, extra_tensors)
        self._plain = {name: tensor for name, tensor in plain.items() if name not in extra}
        registered = {
            name: (part.address, part.address + part.nbytes)
            for name, part in client.session.components.items()
        }
        self._owned = find.own(self._roots, self._found, extra=extra, registered=registered)
        #: Names that what is new cannot have, though this model may use them.
        self._taken = {
            part
            for parts in self._owned.made_of.values()
            for part in parts
            if isinstance(part, str)
        }
        self._starts = {id(one.module) for one in self._found}

    def run(
        self,
        attachment: Attachment,
        chosen: OffloadSettings | None,
        how: How,
        wrap_methods: Methods,
    ) -> None:
        self._taken.update(attachment.registered)
        hows = self._hows(chosen, how)
        if not hows:
            attachment.summary = "nothing: no setting says that anything is to be offloaded"
            log.info("attached: %s", attachment)
            return
        methods = self._methods(wrap_methods)
        self._register(attachment, hows)
        attachment.uninstall()
        attachment.components = {one.name: self._attached(one) for one in self._found}
        self._install(attachment, methods)
        attachment.summary = self._summary(attachment)
        log.info("attached: %s", attachment)
        if self._plain:
            log.warning("%s", _said_of(self._plain))

    def _called(self, name: str) -> str:
        """A name of the model, as the daemon knows it; of a piece, what it is to be called."""
        called = f"{self._prefix}.{name}" if self._prefix else name
        if self._prefix and name == self._whole:
            called = self._prefix
        more = (f"{called}~{n}" for n in itertools.count(2))
        while called in self._taken:
            called = next(more)
        return called

    # --- how -----------------------------------------------------------------------------

    def _hows(self, chosen: OffloadSettings | None, how: How) -> dict[str, How]:
        """By component; what is in another, or has others in it, excludes nobody."""
        sizes = {one.name: self._own_bytes(one) for one in self._found}
        if chosen is not None:
            hows = strategy.of_settings(sizes, chosen)
        else:
            hows = dict.fromkeys(sizes, how)
        return {n: How() if h.exclusive and self._is_nested(n) else h for n, h in hows.items()}

    def _own_bytes(self, one: Found) -> int:
        piece = self._owned.pieces.get(one.name)
        return 0 if piece is None else piece.nbytes

    def _is_nested(self, name: str) -> bool:
        by_name = {one.name: one.module for one in self._found}
        mine = set(by_name[name].modules())
        return any(
            module in mine or by_name[name] in set(module.modules())
            for other, module in by_name.items()
            if other != name
        )

    # --- the weights ---------------------------------------------------------------------

    def _register(self, attachment: Attachment, hows: Mapping[str, How]) -> None:
        number = next(_numbers)
        before = len(attachment.registered)
        group = f"attach {self._client.session.welcome.session}.{number}"
        try:
            for piece in self._owned.pieces.values():
                called = self._called(piece.name)
                how = hows.get(piece.name) or self._shared(piece.name, hows)
                if any(isinstance(part, str) for part in self._owned.made_of.get(piece.name, ())):
                    how = How()  # it comes beside what may be of a group
                self._client.register(
                    called,
                    piece.tensors,
                    policy=how.policy,
                    group=group if how.exclusive else None,
                    part_of=self._called(how.part_of) if how.part_of else "",
                )
                attachment.registered.append(called)
        except BaseException as exc:
            attachment.take_back_to(before)
            if isinstance(exc, DuplicateName):
                raise DuplicateName(
                    f"{exc}. Give this model's components names of their own: attach(..., "
                    "prefix=...)"
                ) from exc
            raise

    def _shared(self, name: str, hows: Mapping[str, How]) -> How:
        """What several use goes when all of them would, and stays if one would."""
        piece = self._owned.pieces[name]
        users = [hows[one] for one, parts in self._owned.made_of.items() if piece in parts]
        for policy in ("sequential", "resident"):
            quantifier = all if policy == "sequential" else any
            if quantifier(how.policy == policy for how in users):
                return How(policy)
        return How()

    def _names(self, parts: Sequence[Part]) -> list[str]:
        """As the daemon knows them."""
        return [self._called(part.name) if isinstance(part, Piece) else part for part in parts]

    def _attached(self, one: Found) -> Attached:
        names = self._names(self._owned.made_of[one.name])
        held = Leased(self._client, names) if names else None
        nbytes = sum(self._client.session.own(name).nbytes for name in names)
        return Attached(one.name, one.module, held, nbytes)

    # --- hooks ---------------------------------------------------------------------------

    def _methods(self, wrap_methods: Methods) -> dict[str, set[str]]:
        """By component, the methods to wrap. Raises: InvalidSource."""
        methods = {o.name: set(hooks.methods_of(find.bare(o.module))) for o in self._found}
        named: Mapping[str, Sequence[str]] = (
            wrap_methods
            if isinstance(wrap_methods, Mapping)
            else dict.fromkeys(methods, wrap_methods)
        )
        for name, wanted in named.items():
            if name not in methods:
                there = ", ".join(methods)
                raise InvalidSource(f"wrap_methods: no component {name!r}; there are: {there}")
            module = next(one.module for one in self._found if one.name == name)
            has = {method for method in wanted if callable(getattr(module, method, None))}
            if isinstance(wrap_methods, Mapping) and (missing := set(wanted) - has):
                raise InvalidSource(f"wrap_methods: {name!r} has no method {missing.pop()!r}")
            methods[name] |= has
        return methods

    def _install(self, attachment: Attachment, methods: Mapping[str, set[str]]) -> None:
        done: set[int] = set()

        def install(module: torch.nn.Module, gate: Gate) -> None:
            if id(module) not in done:
                done.add(id(module))
                attachment.to_undo(hooks.install(module, gate))

        for module, parts in self._owned.outside.items():
            names = self._names(parts)
            held = Leased(self._client, names)
            install(module, Gate("+".join(names), held, held))
        for one in attachment.components.values():
            if one.held is None:
                continue
            gate = Gate(one.name, one.held, one.held)
            gate.parameters = tuple(
                parameter
                for module in self._modules(one)
                for parameter in module._parameters.values()
                if parameter is not None
            )
            gate.growth = self._growth(one)
            attachment.to_undo(growth.watch(gate.growth, self._modules(one)))
            for module in entrances(one.module, self._starts):
                install(module, gate)
            for method in sorted(methods[one.name]):
                attachment.to_undo(hooks.wrap(find.bare(one.module), method, gate))

    def _modules(self, one: Attached) -> Iterator[torch.nn.Module]:
        return find.walk(one.module, self._starts)

    def _growth(self, one: Attached) -> Growth:
        components = self._client.session.components

        def covers(tensor: torch.Tensor) -> bool:
            span = find.span_of(tensor)
            parts = list(components.values())
            return span is None or any(0 <= span[0] - p.address < p.nbytes for p in parts)

        return Growth(one.name, lambda: self._modules(one), covers)

    # --- what is said --------------------------------------------------------------------

    def _summary(self, attachment: Attachment) -> str:
        why = "none of the usual names is there, so all of it is one component: "
        found = ", ".join(f"{c.name} ({size(c.nbytes)})" for c in attachment.components.values())
        left = self._owned.left_bytes
        rest = f"; {size(left)} of other parameters stay where they are" if left else ""
        return f"{why if self._guessed else ''}{found}{rest}"


def entrances(root: torch.nn.Module, starts: set[int]) -> list[torch.nn.Module]:
    """The modules of a component that are called from outside it.

    The root, its children and theirs, and embeddings at any depth; not what is in a list, which is
    called in turn, nor what is compiled into one with what is around it.
    """
    found = [root]
    waiting = [(root, 0)]
    while waiting:
        module, depth = waiting.pop()
        if find.bare(module) is not module:
            continue
        listed = isinstance(module, find.CONTAINERS)
        for child in module._modules.values():
            if child is None or id(child) in starts:
                continue
            near = depth < DEPTH and not listed and not isinstance(child, find.CONTAINERS)
            if near or isinstance(child, torch.nn.Embedding):
                found.append(child)
            waiting.append((child, DEPTH if listed else depth + 1))
    return found


def _extra(plain: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    extra: dict[str, torch.Tensor] = {}
    for name in wanted:
        matches = {n: t for n, t in plain.items() if n == name or fnmatchcase(n, name)}
        if not matches:
            there = ", ".join(plain) or "none"
            raise InvalidSource(f"extra_tensors: nothing is called {name!r}; there are: {there}")
        extra.update(matches)
    return extra


def _said_of(plain: Mapping[str, torch.Tensor]) -> str:
    said = ", ".join(f"{name} ({size(tensor.nbytes)})" for name, tensor in plain.items())
    return (
        f"tensors that are neither parameters nor buffers stay in private memory: {said}. "
        "extra_tensors= takes in those that never change"
    )
