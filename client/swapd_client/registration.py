"""How components are registered and unregistered: the requests, and the work between them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from swapd.shared import protocol
from swapd_client import finalizers
from swapd_client.cancellation import stop_if_cancelled
from swapd_client.checks import A_SIZE
from swapd_client.errors import (
    ClientClosed,
    DeviceFailed,
    DuplicateName,
    InUse,
    InvalidSource,
    OutOfMemory,
    SessionEnded,
    SwapdError,
    Timeout,
    UnknownComponent,
)
from swapd_client.interrupts import to_its_end
from swapd_client.leasing import Leasing
from swapd_client.memory.component import Component
from swapd_client.memory.layout import ContentMismatch
from swapd_client.memory.part import Part
from swapd_client.memory.scratch import Scratch
from swapd_client.memory.sources import watch
from swapd_client.session.registry import alone
from swapd_client.session.session import Session

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Layouts = Mapping[str, Any]

#: Seconds to wait for a name that a collected object still has.
AWAIT_S = 5.0


# --- in ------------------------------------------------------------------------------------


def register(
    leasing: Leasing,
    prepare: Callable[[], Iterable[Part]],
    keeping: Mapping[str, int | None] = MappingProxyType({}),
) -> list[Component]:
    """Register the parts that `prepare()` makes, and rebind their tensors; return the components.

    `keeping`: by family, the bytes to keep on the device. Until that is granted, all its parts
    leave the device at their release. Blocks for the copies. After an error or an interrupt,
    nothing is registered.
    """
    registry = leasing.session.registry
    parts: list[Part] = []
    registered: list[Part] = []
    binding = False
    try:
        parts.extend(prepare())  # parts made before an error stay in it
        while True:
            try:
                _fill(leasing, parts, keeping, registered)
                break
            except ContentMismatch as lie:
                _take_out(leasing, registered)
                registered.clear()
                registry.start_over(parts, lie)
        made = [Component(part) for part in parts]
        with leasing.session.life.changing():
            _commit(leasing, parts, keeping)
            binding = True
            for part in parts:
                to_its_end(partial(registry.bind, part))
                watch(part)
        return made
    except BaseException:
        if binding:  # an interrupt: some tensors have moved
            for part in parts:
                to_its_end(partial(registry.bind, part))
                with suppress(SwapdError):
                    unregister(leasing, part.name)
        else:
            _take_out(leasing, registered)
            for part in parts:
                registry.discard(part)
        raise


def planned(
    leasing: Leasing, plan: AbstractContextManager[Layouts], register: Callable[[Layouts], T]
) -> T:
    """Return `register(layouts)`, with the layouts that exist while `plan` is entered.

    After an error or an interrupt, even when `plan` is left, nothing is registered.
    """
    layouts: Layouts = {}
    try:
        with plan as layouts:
            return register(layouts)
    except BaseException:
        for part in leasing.session.registry.all():
            if any(part.layout is layout for layout in layouts.values()):
                with suppress(SwapdError):
                    unregister(leasing, part.name)
        raise


def scratch_of(session: Session, what: "int | torch.Tensor", *, mutable: bool) -> dict[str, Any]:
    """Return arguments of `Registry.prepare` for scratch.

    `what`: a number of bytes, or the tensor of former scratch, which keeps its address.
    """
    tensor: Any = what if hasattr(what, "untyped_storage") else None
    nbytes = what if tensor is None else tensor.nbytes
    if not isinstance(nbytes, int) or not 0 < nbytes < 1 << 63:
        said = f"{nbytes} bytes" if isinstance(nbytes, int) else repr(what)
        raise InvalidSource(f"scratch of {said}: give {A_SIZE}")
    kind: protocol.Scratch = "saved" if mutable else "dropped"
    layout = Scratch(nbytes, kind, session.processor.index, tensor, session.processor.fetch)
    return {"source": layout, "mutable": True, "stays": tensor is not None}


def register_again(
    leasing: Leasing,
    parts: Iterable[Part],
    keeping: Mapping[str, int | None] = MappingProxyType({}),
) -> None:
    """Register components of a lost daemon as they were, at their addresses: all or nothing.

    Their session is closed, or they wait in it (`Session.leave`). Blocks and raises as `register`;
    InvalidSource if a component would move.
    """
    register(leasing, lambda: map(leasing.session.registry.prepare_again, parts), keeping)


def _fill(
    leasing: Leasing,
    parts: Iterable[Part],
    keeping: Mapping[str, int | None],
    registered: list[Part],
) -> None:
    """Register and fill all parts. `registered` collects those that the daemon knows."""
    for part in parts:
        registered.append(part)  # first: an interrupt may come after the daemon's answer
        try:
            _ask(leasing, part, transient=part.part_of in keeping)
        except SwapdError:
            registered.pop()
            raise
    for part in parts:
        stop_if_cancelled()
        leasing.session.registry.fill(part)


def _commit(leasing: Leasing, parts: Sequence[Part], keeping: Mapping[str, int | None]) -> None:
    registry, call, next_id = leasing.session.registry, leasing.call, leasing.session.next_id
    try:
        for part in parts:
            registry.enter(part)  # after the commit another thread may be granted it
        for part in parts:
            call(protocol.Commit(next_id(), part.name))
        for family, nbytes in keeping.items():
            call(protocol.Resize(next_id(), family, nbytes))
    except BaseException:
        for part in parts:
            registry.forget(part)
        raise
    registry.kept.update(keeping)


def _ask(leasing: Leasing, part: Part, *, transient: bool) -> None:
    """Register a component; if its name is taken, first collect garbage that may have it."""
    session = leasing.session

    def ask() -> None:
        request = session.registry.request(part, session.next_id(), transient=transient)
        if part.old_master is not None:  # the daemon may reuse it
            session.lifeline.send(protocol.HandBack(request.id), [part.old_master.fileno()])
        leasing.call(request)

    try:
        ask()
    except DuplicateName:
        finalizers.settle(AWAIT_S)
        leasing.call(session.harmless())  # after its reply the daemon knows these ends
        ask()


def _take_out(leasing: Leasing, registered: Sequence[Part]) -> None:
    session = leasing.session
    for part in registered if session.error is None else ():
        with suppress(SwapdError):  # report the first error
            leasing.call(protocol.Unregister(session.next_id(), part.name))


# --- out -----------------------------------------------------------------------------------


def refuse_in_use(leasing: Leasing, names: Collection[str]) -> None:
    """Raise InUse if one of these is leased: `unregister` would fail."""
    if not names:
        return
    leasing.giving_back.flush_kept()
    leasing.session.leases.drain()
    reply = leasing.call_unless_silent(protocol.StatusRequest(leasing.session.next_id()))
    assert isinstance(reply, protocol.Status)
    for component in reply.components:
        if component.leases and component.name in names:
            raise InUse(
                f"{component.name!r} is leased by {', '.join(component.holders)}; release it, "
                "then detach"
            )


def unregister(leasing: Leasing, name: str) -> None:
    """Unregister a component, after the work under released leases.

    Blocks while the daemon saves its bytes. Raises Timeout if the daemon falls silent: then call
    this again, because the daemon may do it once it goes on.
    """
    session = leasing.session
    leasing.giving_back.flush_kept()
    session.check()
    part = session.registry.own(name)
    session.leases.drain()

    def leave() -> None:
        if not session.has(part):
            return
        session.registry.unbinding.before_unbind(part)
        try:
            with suppress(UnknownComponent):  # the daemon knew before an interrupt
                leasing.call_unless_silent(protocol.Unregister(session.next_id(), name))
        except BaseException:
            part.where.give_memory_back()
            raise
        session.registry.unbinding.unbind(part)

    with session.life.changing(), alone(session.life, [part]):
        to_its_end(leave)
    session.registry.forget_size(part.part_of)


def end(leasing: Leasing, *, keep: bool) -> None:
    """End a client's session, as `Client.close`. Its channels stay open."""
    session = leasing.session
    if not session.forked:  # else the parent owns all of it, and locks may be held for good
        leasing.giving_back.keep_no_more()
        session.leases.drain()
        if keep:
            # Then the last bytes are already private, or are where they are with a daemon that is
            # gone, or a signal handler has closed meanwhile.
            with suppress(SessionEnded, Timeout, ClientClosed):
                take_back_mutable(leasing)
    session.close(keep=keep)


def take_back_mutable(leasing: Leasing) -> None:
    """Unregister mutable components before closing, while the daemon can still save them."""
    session = leasing.session
    mutable = [part for part in session.registry.all() if part.mutable]
    if session.error is not None or not mutable:
        return
    for record in session.leases:
        if record.state == "held":
            session.leases.marks.set(record)
            leasing.giving_back.end_now(record)
    session.leases.drain()
    for part in mutable:
        # Bytes stay where they are if another session uses them, or they have no room or cannot be
        # saved. Another close may have unregistered the part.
        with suppress(InUse, OutOfMemory, DeviceFailed, UnknownComponent):
            unregister(leasing, part.name)
