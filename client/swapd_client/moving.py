"""How components get into swapd and out of it: what is asked of the daemon, and done meanwhile.

Both clients do this alike, so each function is a generator of steps: it yields a request, and is
sent the reply, or what blocks, and is sent what that returns; what goes wrong is thrown into it.
`take` takes the steps in the caller's thread; `take_awaited` awaits each of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from swapd.shared import protocol
from swapd_client.errors import (
    ComponentInUse,
    DeviceFailed,
    DeviceMemoryExhausted,
    SwapdError,
)
from swapd_client.leases.book import Record
from swapd_client.memory.layout import OtherBytes, Segments
from swapd_client.memory.part import Part
from swapd_client.session.session import Session

T = TypeVar("T")

#: Steps that end with a result of this kind.
Steps = Generator[protocol.AnyRequest | Callable[[], Any], Any, T]
#: Sends a request and waits; raises what it is refused with.
Call = Callable[[protocol.AnyRequest], protocol.AnyReply]


def take(steps: Steps[T], call: Call) -> T:
    """Take all steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                done = call(step) if isinstance(step, msgspec.Struct) else step()
            except BaseException as exc:  # noqa: BLE001 - it is the steps' to say what follows
                step = steps.throw(exc)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: T = end.value
        return result


async def take_awaited(
    steps: Steps[T], call: Callable[[protocol.AnyRequest], Awaitable[protocol.AnyReply]]
) -> T:
    """Take all steps without blocking the loop: what blocks is done in threads."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, msgspec.Struct):
                    done: Any = await call(step)
                else:
                    done = await in_thread(step)
            except BaseException as exc:  # noqa: BLE001 - as above, cancellation included
                step = steps.throw(exc)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: T = end.value
        return result


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Call in a thread; it has ended when this does, also when this is cancelled."""
    calling = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.gather(calling, return_exceptions=True)
        raise


# --- in ------------------------------------------------------------------------------------


def register(
    session: Session,
    name: str,
    source: object,
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    segments: Segments,
    part_of: str,
) -> Steps[Part]:
    """One component."""
    prepare = session.registry.prepare
    part: Part = yield partial(
        prepare, name, source, mutable=mutable, segments=segments, part_of=part_of
    )
    yield from _move_in(session, {part: policy}, group)
    return part


def register_family(
    session: Session,
    name: str,
    sources: Mapping[str, Any],
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    resident_bytes: int | None,
) -> Steps[list[Part]]:
    """A component in parts, of which so many bytes are kept on the device."""
    prepare = session.registry.prepare_family
    parts: list[Part] = yield partial(prepare, name, sources, mutable=mutable)
    keeping = partial(protocol.Resize, name=name, resident_bytes=resident_bytes)
    yield from _move_in(session, dict.fromkeys(parts, policy), group, keeping)
    return parts


def register_again(
    session: Session, sources: Mapping[str, tuple[object, protocol.Policy]]
) -> Steps[None]:
    """What lost its daemon, by name, each where it lies: all of them or none."""
    prepared: dict[Part, protocol.Policy] = {}
    try:
        for name, (source, policy) in sources.items():
            prepare = partial(session.registry.prepare, name, source, mutable=False, stays=True)
            prepared[(yield prepare)] = policy
    except BaseException:
        for part in prepared:
            session.registry.discard(part)
        raise
    yield from _move_in(session, prepared, None)


def _move_in(
    session: Session,
    parts: Mapping[Part, protocol.Policy],
    group: str | None,
    keeping: Callable[[int], protocol.Resize] | None = None,
) -> Steps[None]:
    """Have masters made and filled, and rebind the tensors when all of it went well.

    `keeping` makes the request that says which parts of a family are kept: until it is granted
    they pass through.
    """
    registry = session.registry
    registered: list[Part] = []
    try:
        for part, policy in parts.items():
            number = session.next_id()
            yield registry.request(part, number, policy, group, transient=keeping is not None)
            registered.append(part)
        for part in parts:
            yield partial(registry.fill, part)
        for part in parts:
            yield protocol.Commit(session.next_id(), part.name)
        if keeping is not None:
            yield keeping(session.next_id())
    except OtherBytes as lie:
        yield from _take_out(session, registered)
        registry.start_over(parts, lie)
        return (yield from _move_in(session, parts, group, keeping))
    except BaseException:
        try:
            yield from _take_out(session, registered)
        finally:
            for part in parts:
                registry.discard(part)
        raise
    for part in parts:
        registry.bind(part)


def _take_out(session: Session, registered: Sequence[Part]) -> Steps[None]:
    for part in registered if session.error is None else ():
        with suppress(SwapdError):  # what went wrong first is what to say
            yield protocol.Unregister(session.next_id(), part.name)


# --- out -----------------------------------------------------------------------------------


def unregister(session: Session, name: str) -> Steps[None]:
    """Take a component back, when the work under leases that were released is done."""
    registry = session.registry
    part = registry.own(name)
    session.check()
    yield session.leases.drain
    registry.before_unbind(part)
    try:
        yield protocol.Unregister(session.next_id(), name)
    except BaseException:
        part.where.give_memory_back()
        raise
    yield partial(registry.unbind, part)


def take_back_mutable(session: Session, release: Callable[[Record], None]) -> Steps[None]:
    """A client closes: what was written to is taken back while there is a daemon to save it.

    `release` ends a lease.
    """
    mutable = [part for part in session.registry.all() if part.mutable]
    if session.error is not None or not mutable:
        return
    for record in session.leases:
        record.work = session.leases.mark(session.leases.current_streams())
        release(record)
    yield session.leases.drain
    for part in mutable:
        # in use by another session, no room, or not to be saved: its bytes stay where they are
        with suppress(ComponentInUse, DeviceMemoryExhausted, DeviceFailed):
            yield from unregister(session, part.name)
