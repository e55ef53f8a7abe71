"""Attaches a model: finds its components, registers them, installs hooks. Errors undo all of it."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from swapd.shared.text import counted
from swapd.shared.units import size
from swapd_client import finalizers
from swapd_client.errors import DuplicateName, InvalidSource, SwapdError, TooLarge
from swapd_client.interrupts import to_its_end
from swapd_client.log import log
from swapd_client.memory.movable import nbytes_of
from swapd_client.offload import hooks, ownership, search, strategy, tools
from swapd_client.offload.arguments import Arguments
from swapd_client.offload.attach_barrier import without_calls
from swapd_client.offload.attachment import ONE_AT_A_TIME, Attachment, take_back_if_dropped
from swapd_client.offload.fitting import refuse_what_never_fits
from swapd_client.offload.holdables import (
    AttachedComponent,
    BlockHold,
    PassHold,
    StreamedComponent,
)
from swapd_client.offload.hooks import BlockHooks
from swapd_client.offload.installation import Installer, entrances, methods_of
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.private import PrivateBytes, Trained, staying, trained_of
from swapd_client.offload.registering import (
    Registration,
    ToSource,
    stream_of,
    warn_of_registered,
)
from swapd_client.offload.scope import ComponentHold
from swapd_client.offload.search import ComponentModule
from swapd_client.offload.strategy import Kind, Sharing


def attach(
    client: AttachClient, model: object, arguments: Arguments, source: ToSource = dict
) -> Attachment:
    """As `Client.attach`. `source` makes the source of each new component, of its tensors."""
    attachment = Attachment(client, arguments.prefix)
    try:
        try:
            _attach(client, model, arguments, attachment, source)
        except DuplicateName:
            finalizers.settle()  # the name may belong to a dead model
            _attach(client, model, arguments, attachment, source)
        return attachment
    except Exception:
        raise
    except BaseException:  # an interrupt, perhaps after all was done
        with suppress(SwapdError):
            attachment.detach()
        raise


def _attach(
    client: AttachClient,
    model: object,
    arguments: Arguments,
    attachment: Attachment,
    source: ToSource,
) -> None:
    def run() -> None:
        again = _Attaching(client, model, arguments, attachment)
        again.without_calls(again.run)

    try:
        with ONE_AT_A_TIME:
            attaching = _Attaching(client, model, arguments, attachment, source)
            attaching.refuse_attached()
            attaching.without_calls(attaching.run_or_undo)
            attachment._again = run
    except SwapdError:
        attachment.let_go_if_closed()  # then that is the error to report
        raise
    client.attachments.add(attachment)
    take_back_if_dropped(client, attachment)
    attachment.let_go_if_closed()


class _Attaching:
    def __init__(
        self,
        client: AttachClient,
        model: object,
        arguments: Arguments,
        attachment: Attachment,
        source: ToSource = dict,
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._source = source
        self._attachment = attachment
        self._roots = search.roots_of(model)
        search.refuse_hooked(self._roots)
        wanted = arguments.components
        self._found = search.components_of(self._roots, wanted)
        search.refuse_compiled(self._roots, self._found)
        self._starts = {id(one.module) for one in self._found}
        self._whole = next((one.name for one in self._found if one.whole), None)
        self._guessed = wanted is None and self._whole is not None
        plain = ownership.plain_tensors(self._roots, self._found)
        extra = _extra(plain, arguments.extra_tensors)
        #: Neither parameters nor buffers; they stay private.
        self._plain = {name: tensor for name, tensor in plain.items() if name not in extra}
        self._trained = self._trained_now()
        self._left_over = self._hooks_left_over()
        self._owned = ownership.own(
            self._roots,
            self._found,
            extra=extra,
            client=client,
            trained=self._trained,
            serves_rest=wanted is None,
        )
        self._taken = self._names_taken()
        self._how = self._hows()
        self._methods = methods_of(self._found, arguments.wrap_methods) if self._how else {}

    def _trained_now(self) -> Trained:
        walks = [search.walk(one.module, self._starts) for one in self._found]
        modules = search.modules_of(self._roots)
        trained = trained_of(walks, modules, self._arguments.trainable)
        before = self._attachment.trained
        there = (p for module in modules.values() for _, p in ownership.own_parameters(module))
        return trained | {id(p): p for p in there if id(p) in before}

    def _hooks_left_over(self) -> list[Attachment]:
        mine = {one.module for one in self._found}
        return [
            one
            for one in self._client.attachments
            if one.is_detached and mine.issuperset(c.module for c in one.components.values())
        ]

    def _names_taken(self) -> set[str]:
        used = {p for parts in self._owned.made_of.values() for p in parts if isinstance(p, str)}
        taken = used.union(self._attachment.registered)
        components = self._client.session.components.items()
        taken.update([c.part_of for name, c in components if name in taken])
        return taken

    def refuse_attached(self) -> None:
        """Raise if a module is attached already: two attachments could undo each other's hooks."""
        there = (c.module for one in self._left_over for c in one.components.values())
        left = {m for module in there for m in module.modules()}
        for one in self._found:
            if any(hooks.is_attached(m) for m in one.module.modules() if m not in left):
                raise InvalidSource(
                    f"{one.name!r} is attached already, and its hooks serve every caller: name the "
                    "others (components=[...]), or detach() first; if it has grown, refresh()"
                )

    def without_calls(self, do: Callable[[], None]) -> None:
        if not self._how:
            return do()
        outside = self._owned.outside
        doors = {m for one in self._found for m in entrances(one.module, self._starts)}
        modules = {m for one in self._found for m in search.walk(one.module, self._starts)}
        methods = {name for names in self._methods.values() for name in names}
        without_calls(doors.union(outside), modules.union(outside), methods, do)

    def run_or_undo(self) -> None:
        try:
            self.run()
        except BaseException:
            self._attachment._uninstall()
            self._attachment._take_back()
            raise

    def run(self) -> None:
        if self._how:
            again = bool(self._attachment.registered)
            self._register()  # no interrupt comes before the next line
            to_its_end(self._install)  # weights without their hooks would be read without a lease
            self._attachment.take_back_lost()
            self._made.size_again()
            self._refuse_what_never_fits(again=again)
        found = [one.name for one in self._found if not one.whole]
        stays = staying(search.modules_of(self._roots), found, self._owned.left)
        self._attachment.summary = self._summary(stays)
        log.info("attached: %s", self._attachment)
        if self._how:
            self._warn(stays)

    def _called(self, name: str) -> str:
        prefix = self._arguments.prefix
        called = prefix if prefix and name == self._whole else search.join(prefix, name)
        more = (f"{called}~{n}" for n in itertools.count(2))
        return next(one for one in itertools.chain([called], more) if one not in self._taken)

    def _hows(self) -> dict[str, Sharing]:
        """Return how each component shares the device.

        A component that is nested, or runs at each step of a DiT without being named, excludes no
        other.
        """
        given, sizes = self._arguments, self._sizes()
        strategy.refuse_kinds(given.kinds, sizes)
        strategy.refuse_unknown("stay", given.stay, sizes)
        if given.settings is not None and given.settings.mode == "off":
            return {}
        hows = self._hows_of_moving(sizes)
        hows |= dict.fromkeys(given.stay, Sharing("permanent"))
        beside = strategy.beside_dits(hows, self._kind_of) if given.components is None else ()
        for name, how in hows.items():
            if how.is_exclusive and (name in beside or self._is_nested(name)):
                hows[name] = replace(how, policy="lru", part_of="")
        return hows

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of each component that no other one shares."""
        sizes = dict.fromkeys((one.name for one in self._found), 0)
        own = ((name, piece.nbytes) for name, piece in self._owned.pieces.items() if name in sizes)
        return sizes | dict(own)

    def _kind_of(self, name: str) -> Kind:
        return self._arguments.kinds.get(name) or strategy.kind_of(name)

    def _hows_of_moving(self, sizes: Mapping[str, int]) -> dict[str, Sharing]:
        given, kind_of = self._arguments, self._kind_of
        moving = {name: nbytes for name, nbytes in sizes.items() if name not in given.stay}
        if given.settings is None:
            hows = dict.fromkeys(moving, Sharing(given.policy))
        else:
            hows = strategy.of_settings(moving, given.settings, kind_of)
        streamed = {"resident": given.resident, "blocks": given.blocks}
        return strategy.of_arguments(moving, hows, given.stay, streamed, kind_of)

    def _is_nested(self, name: str) -> bool:
        by_name = {one.name: one.module for one in self._found}
        mine = set(by_name[name].modules())
        return any(
            module in mine or by_name[name] in set(module.modules())
            for other, module in by_name.items()
            if other != name
        )

    def _register(self) -> None:
        self._made = Registration(
            self._client,
            self._owned,
            self._how,
            self._called,
            self._starts,
            self._attachment.streamed,
            self._source,
        )
        self._made.run(self._found, self._trained, self._attachment.registered)

    def _names(self, parts: Iterable[ownership.Part]) -> list[str]:
        names_of = self._made.names_of
        found = ([p] if isinstance(p, str) else names_of(p) for p in parts)
        return list(itertools.chain.from_iterable(found))

    def _install(self) -> None:
        attachment = self._attachment
        for before in (*self._left_over, attachment):
            before._uninstall()
        attachment.streamed = self._made.streamed
        attachment.trained = self._trained
        attachment.to_undo(tools.rest)
        attachment.components = {one.name: self._attached(one) for one in self._found}
        if self._client.session.is_disabled:
            for root in self._roots.values():
                weakref.finalize(root, id, attachment.kept).atexit = False  # keeps it until then
            return
        installer = Installer(self._client, attachment, self._roots, self._starts)
        for module, parts in self._owned.outside.items():
            installer.outside(module, self._names(parts))
        for one in attachment.components.values():
            if one.held is not None:
                installer.component(one, self._methods[one.name])
                installer.guard(one)
        installer.around()
        tools.watch()

    def _refuse_what_never_fits(self, *, again: bool) -> None:
        own, components = self._client.session.own, self._attachment.components
        never_leave = {
            called: None
            for name, one in components.items()
            if name not in self._attachment.streamed
            for called in one.all_of_it.names
            if own(called).policy == "permanent"
        }
        try:
            refuse_what_never_fits(self._client, components, list(never_leave))
        except TooLarge as exc:
            if not again:  # at a refresh, the old components are in use already
                raise
            log.warning("%s", exc)

    def _attached(self, one: ComponentModule) -> AttachedComponent:
        client = self._client
        names = self._names(self._owned.made_of[one.name])
        nbytes = sum(client.session.own(name).nbytes for name in names)
        all_of_it = ComponentHold(client, names)
        if (streamed := self._streamed(one, names)) is None:
            return AttachedComponent(
                one.name, one.module, all_of_it if names else None, all_of_it, nbytes
            )
        others = [name for name in names if name not in streamed.stream.everything]
        beside = ComponentHold(client, others) if others else None
        held = PassHold(streamed.stream, beside, all_of_it, BlockHooks())
        attached = AttachedComponent(one.name, one.module, held, all_of_it, nbytes)
        for number, modules in enumerate(streamed.blocks):
            attached.blocks.update(dict.fromkeys(modules, BlockHold(held, number)))
        return attached

    def _streamed(self, one: ComponentModule, names: Sequence[str]) -> StreamedComponent | None:
        attachment = self._attachment
        found = attachment.streamed.get(one.name)
        if found is None:
            before = [name for name in names if name not in attachment.registered]
            found = stream_of(self._client, one, before)
            if found is not None:
                attachment.streamed[one.name] = found
        return found

    def _summary(self, stays: PrivateBytes) -> str:
        components = self._attachment.components.values()
        if not components:
            return "nothing: no setting enables offloading"
        why = "no module has a usual name, so the whole model is one component: "
        found = ", ".join(_described(one, self._attachment.streamed) for one in components)
        rest = f"; {said}" if (said := stays.line()) else ""
        if trained := self._owned.trained_bytes:
            rest += f"; {size(trained)} of parameters that are trained stay private"
        return f"{why if self._guessed else ''}{found}{rest}"

    def _warn(self, stays: PrivateBytes) -> None:
        ours = self._attachment.registered
        warn_of_registered(self._client, self._how, self._owned.made_of, ours)
        lent = sum(one.nbytes for one in self._attachment.components.values())
        for said in stays.warnings(lent, named=self._arguments.components is not None):
            log.warning("%s", said)
        if self._plain:
            log.warning(
                "tensors that are neither parameters nor buffers stay in private memory: %s. Name "
                "those that never change in extra_tensors=",
                ", ".join(f"{name} ({size(nbytes_of(t))})" for name, t in self._plain.items()),
            )


def _described(one: AttachedComponent, streamed: Mapping[str, StreamedComponent]) -> str:
    blocks = streamed[one.name].blocks if one.name in streamed else ()
    how = f", streamed in {counted(len(blocks), 'block')}" if blocks else ""
    return f"{one.name} ({size(one.nbytes)}{how})"


def _extra(plain: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    extra: dict[str, torch.Tensor] = {}
    for name in wanted:
        matches = search.matching(name, plain)
        if not matches:
            there = ", ".join(plain) or "none"
            raise InvalidSource(f"extra_tensors: nothing is called {name!r}; there are: {there}")
        extra.update(matches)
    return extra
