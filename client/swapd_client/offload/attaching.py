"""Attaches a model: finds its components, registers them, installs hooks. All of it, or nothing."""

import gc
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch

from swapd.shared.protocol import Policy
from swapd.shared.units import size
from swapd_client.errors import DuplicateName, InvalidSettings, InvalidSource, TooLarge
from swapd_client.memory.tensors import nbytes_of
from swapd_client.offload import dropped, find, hooks, strategy, tools
from swapd_client.offload.attachment import ONE_AT_A_TIME, Attached, Attachment
from swapd_client.offload.calls_under_way import no_calls
from swapd_client.offload.find import Found
from swapd_client.offload.fitting import refuse_what_never_fits
from swapd_client.offload.installing import Installer, Methods, entrances, methods_of
from swapd_client.offload.lender import Lender
from swapd_client.offload.registering import Registering, Streamed, stream_of
from swapd_client.offload.scope import Block, Leased, Passed
from swapd_client.offload.settings import OffloadSettings, from_keywords
from swapd_client.offload.shortcuts import BlockHooks
from swapd_client.offload.staying import Staying, staying
from swapd_client.offload.strategy import How, Kind
from swapd_client.offload.training import Trainable, trained_of

log = logging.getLogger("swapd_client")

_Names = TypeVar("_Names")


@dataclass(frozen=True)
class Arguments:
    """The arguments of `Client.attach`."""

    components: Sequence[str] | None
    settings: OffloadSettings | None
    prefix: str
    #: For all components, if there are no settings.
    how: How
    resident: int | str | Mapping[str, int | str] | None
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None
    wrap_methods: Methods
    extra_tensors: Sequence[str]
    #: For components whose name does not show their kind.
    kinds: Mapping[str, Kind]
    #: Components that are never evicted; overrides the settings.
    stay: Sequence[str]
    trainable: Trainable


def arguments_of(
    components: str | Sequence[str] | None,
    *,
    settings: OffloadSettings | None,
    prefix: str,
    policy: Policy,
    resident: int | str | Mapping[str, int | str] | None,
    blocks: Sequence[str] | Mapping[str, Sequence[str]] | None,
    wrap_methods: Methods,
    extra_tensors: Sequence[str],
    kinds: Mapping[str, Kind],
    stay: Sequence[str],
    trainable: Trainable | str,
    flags: Mapping[str, Any],
) -> Arguments:
    """The arguments of `Client.attach`, checked. Raises: InvalidSource, InvalidSettings."""
    settings = _chosen(settings, flags)
    if settings is not None and policy != "lru":
        raise InvalidSource(
            f"policy={policy!r} and settings both set how components share the device; give "
            "one of them"
        )
    if components is None and settings is not None:
        components = settings.cpu_offload_components
    return Arguments(
        components=_listed(components),
        settings=settings,
        prefix=prefix,
        how=How(policy, exclusive=policy == "alternating"),
        resident=resident,
        blocks=_listed(blocks),
        wrap_methods=_listed(wrap_methods),
        extra_tensors=_listed(extra_tensors),
        kinds=kinds,
        stay=_listed(stay),
        trainable=trainable if isinstance(trainable, bool) else _listed(trainable),
    )


def _chosen(given: OffloadSettings | None, flags: Mapping[str, Any]) -> OffloadSettings | None:
    """The settings, from `settings=` or from keyword arguments. Raises: InvalidSettings."""
    if not flags:
        return given
    if given is not None:
        names = ", ".join(flags)
        raise InvalidSettings(f"settings= and {names}: give all in one or the other")
    return from_keywords(**flags)


def _listed(names: _Names) -> _Names:
    """A single name is a list of one name, not of its letters."""
    return cast("_Names", [names]) if isinstance(names, str) else names


def attach(client: Lender, model: object, arguments: Arguments) -> Attachment:
    """Implements `Client.attach`."""
    try:
        return _attach(client, model, arguments)
    except DuplicateName:
        gc.collect()  # the name may belong to a model that is garbage
        dropped.settle()
        return _attach(client, model, arguments)


def _attach(client: Lender, model: object, arguments: Arguments) -> Attachment:
    attachment = Attachment(client, arguments.prefix)

    def run() -> None:
        again = _Attaching(client, model, arguments, attachment)
        with again.no_calls():
            again.run()

    with ONE_AT_A_TIME:
        attaching = _Attaching(client, model, arguments, attachment)
        attaching.refuse_attached()
        with attaching.no_calls():
            try:
                attaching.run()
            except BaseException:
                attachment._uninstall()
                attachment._take_back()
                raise
        attachment._again = run
    dropped.take_back_if_dropped(client, attachment)
    return attachment


class _Attaching:
    """One `attach` or `refresh`. At a `refresh`, much of the model is registered already."""

    def __init__(
        self, client: Lender, model: object, arguments: Arguments, attachment: Attachment
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._attachment = attachment
        self._roots = find.roots_of(model)
        find.refuse_hooked(self._roots)
        wanted = arguments.components
        self._found = find.components_of(self._roots, wanted)
        find.refuse_compiled(self._roots, self._found)
        self._starts = {id(one.module) for one in self._found}
        #: The name of the component that is the whole model, if there is one: the daemon gets the
        #: prefix.
        self._whole = next((one.name for one in self._found if one.whole), None)
        #: Whether the whole model is one component because the caller named none.
        self._guessed = wanted is None and self._whole is not None
        plain = find.plain_tensors(self._roots, self._found)
        extra = _extra(plain, arguments.extra_tensors)
        #: Tensors that are neither parameters nor buffers; they stay private.
        self._plain = {name: tensor for name, tensor in plain.items() if name not in extra}
        walks = [find.walk(one.module, self._starts) for one in self._found]
        modules = find.modules_of(self._roots)
        #: Parameters that stay private, now and at each `refresh`.
        self._trained = trained_of(walks, modules, arguments.trainable)
        before = attachment.trained
        for parameter in (p for m in modules.values() for p in m._parameters.values()):
            if parameter is not None and id(parameter) in before:
                self._trained[id(parameter)] = parameter
        mine = {one.module for one in self._found}
        #: Attachments of these components that were detached, and whose hooks stayed.
        self._left_over = [
            one
            for one in client._attachments
            if one.is_detached and mine.issuperset(c.module for c in one.components.values())
        ]
        components = client.session.components
        self._owned = find.own(
            self._roots,
            self._found,
            extra=extra,
            registered={n: (c.address, c.address + c.nbytes) for n, c in components.items()},
            trained=self._trained,
        )
        used = {p for parts in self._owned.made_of.values() for p in parts if isinstance(p, str)}
        #: Registered names of this model; new components need other names.
        self._taken = used.union(attachment.registered)
        self._taken.update(c.part_of for n, c in components.items() if n in self._taken)
        self._how = self._hows()
        self._methods = methods_of(self._found, arguments.wrap_methods) if self._how else {}

    def refuse_attached(self) -> None:
        """Raise if a module is attached already: two attachments could undo each other's hooks."""
        left = {module for one in self._left_over for module in one.modules()}
        for one in self._found:
            if any(hooks.is_hooked(m) for m in one.module.modules() if m not in left):
                raise InvalidSource(
                    f"{one.name!r} is attached already, and its hooks serve every caller: name the "
                    "others (components=[...]), or detach() first; if it has grown, refresh()"
                )

    def no_calls(self) -> AbstractContextManager[None]:
        """A `with` block in which no other thread is in a call of the components. As `no_calls`."""
        if not self._how:
            return nullcontext()
        outside = self._owned.outside
        doors = {m for one in self._found for m in entrances(one.module, self._starts)}
        modules = {m for one in self._found for m in find.walk(one.module, self._starts)}
        methods = {name for names in self._methods.values() for name in names}
        return no_calls(doors.union(outside), modules.union(outside), methods)

    def run(self) -> None:
        hows, methods = self._how, self._methods
        if hows:
            again = bool(self._attachment.registered)
            self._register(hows)
            self._install(methods)
            self._refuse_what_never_fits(hows, again=again)
        found = [one.name for one in self._found if not one.whole]
        stays = staying(find.modules_of(self._roots), found, self._owned.left)
        self._attachment.summary = self._summary(stays)
        log.info("attached: %s", self._attachment)
        if hows:
            self._warn(stays)

    def _called(self, name: str) -> str:
        """The name of a piece in the daemon."""
        prefix = self._arguments.prefix
        called = f"{prefix}.{name}" if prefix else name
        if prefix and name == self._whole:
            called = prefix
        more = (f"{called}~{n}" for n in itertools.count(2))
        while called in self._taken:
            called = next(more)
        return called

    def _hows(self) -> dict[str, How]:
        """How each component shares the device.

        A component excludes no other if it is nested in one, contains one, or runs at each step of
        a DiT and the caller did not name it.

        """
        given = self._arguments
        sizes = {one.name: self._own_bytes(one) for one in self._found}
        _refuse_unknown("kinds", given.kinds, sizes)
        _refuse_unknown("stay", given.stay, sizes)

        def kind_of(name: str) -> Kind:
            return given.kinds.get(name) or strategy.kind_of(name)

        moving = {name: nbytes for name, nbytes in sizes.items() if name not in given.stay}
        if given.settings is not None:
            hows = strategy.of_settings(moving, given.settings, kind_of)
        else:
            hows = dict.fromkeys(moving, given.how)
        if hows:
            hows = strategy.of_arguments(moving, hows, given.resident, given.blocks, kind_of)
        hows |= dict.fromkeys(given.stay, How("permanent"))
        beside = strategy.beside_dits(hows, kind_of) if given.components is None else ()
        for name, how in hows.items():
            if how.exclusive and (name in beside or self._is_nested(name)):
                hows[name] = replace(how, policy="lru", exclusive=False, part_of="")
        return hows

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

    def _register(self, hows: Mapping[str, How]) -> None:
        given, attachment = self._arguments.blocks, self._attachment
        registering = Registering(self._client, self._owned, hows, self._called)
        blocks: Mapping[str, Sequence[str]] = {}
        if given is not None:
            streamed = [name for name, how in hows.items() if how.streamed]
            blocks = given if isinstance(given, Mapping) else dict.fromkeys(streamed, given)
        registering.run(self._found, blocks, self._starts, self._trained)
        attachment.registered += registering.names
        attachment.streamed |= registering.streamed
        self._names_of = registering.names_of

    def _names(self, parts: Sequence[find.Part]) -> list[str]:
        """The names in the daemon."""
        found = [[part] if isinstance(part, str) else self._names_of[part] for part in parts]
        return [name for names in found for name in names]

    def _install(self, methods: Mapping[str, Sequence[str]]) -> None:
        attachment = self._attachment
        for one in (*self._left_over, attachment):
            one._uninstall()
        attachment.trained = self._trained
        attachment._to_undo(tools.rest)
        attachment.components = {one.name: self._attached(one) for one in self._found}
        installer = Installer(self._client, attachment, self._roots, self._starts)
        for module, parts in self._owned.outside.items():
            installer.outside(module, self._names(parts))
        for one in attachment.components.values():
            if one.held is not None:
                installer.component(one, methods[one.name])
                installer.guard(one)
        installer.around()
        tools.watch()

    def _refuse_what_never_fits(self, hows: Mapping[str, How], *, again: bool) -> None:
        components = self._attachment.components
        never_leave = [
            called
            for name, how in hows.items()
            if how.policy == "permanent" and name not in self._attachment.streamed
            for called in components[name].all_of_it.names
        ]
        try:
            refuse_what_never_fits(self._client, components, never_leave)
        except TooLarge as exc:
            if not again:  # at a refresh, the old components are in use already
                raise
            log.warning("%s", exc)

    def _attached(self, one: Found) -> Attached:
        client = self._client
        names = self._names(self._owned.made_of[one.name])
        nbytes = sum(client.session.own(name).nbytes for name in names)
        all_of_it = Leased(client, names)
        streamed = self._attachment.streamed.get(one.name)
        if streamed is None and (streamed := stream_of(client, one, names)) is not None:
            self._attachment.streamed[one.name] = streamed
        if streamed is None:
            return Attached(one.name, one.module, all_of_it if names else None, all_of_it, nbytes)
        others = [name for name in names if name not in streamed.stream.everything]
        beside = Leased(client, others) if others else None
        held = Passed(streamed.stream, beside, all_of_it, BlockHooks())
        attached = Attached(one.name, one.module, held, all_of_it, nbytes)
        for number, modules in enumerate(streamed.blocks):
            attached.blocks.update(dict.fromkeys(modules, Block(held, number)))
        return attached

    def _summary(self, stays: Staying) -> str:
        """One line: the components, their sizes, and the bytes that stay private."""
        components = self._attachment.components.values()
        if not components:
            return "nothing: no setting enables offloading"
        why = "no module has a usual name, so the whole model is one component: "
        found = ", ".join(_described(one, self._attachment.streamed) for one in components)
        rest = f"; {said}" if (said := stays.line()) else ""
        if trained := self._owned.trained_bytes:
            rest += f"; {size(trained)} of parameters that are trained stay private"
        return f"{why if self._guessed else ''}{found}{rest}"

    def _warn(self, stays: Staying) -> None:
        lent = sum(one.nbytes for one in self._attachment.components.values())
        for said in stays.warnings(lent, named=self._arguments.components is not None):
            log.warning("%s", said)
        if self._plain:
            log.warning("%s", _said_of(self._plain))


def _described(one: Attached, streamed: Mapping[str, Streamed]) -> str:
    blocks = streamed[one.name].blocks if one.name in streamed else ()
    how = f", streamed in {len(blocks)} block{'s' * (len(blocks) > 1)}" if blocks else ""
    return f"{one.name} ({size(one.nbytes)}{how})"


def _refuse_unknown(what: str, names: Iterable[str], there: Iterable[str]) -> None:
    for name in names:
        if name not in there:
            raise InvalidSource(
                f"{what}: no component is called {name!r}; there are: {', '.join(there)}"
            )


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
    said = ", ".join(f"{name} ({size(nbytes_of(tensor))})" for name, tensor in plain.items())
    return (
        f"tensors that are neither parameters nor buffers stay in private memory: {said}. "
        "Name those that never change in extra_tensors="
    )
