"""How components are registered and unregistered: the requests, and the work between them.

Both clients share this code, so each function is a generator of steps. A step is a request, and its
reply goes back into the generator; or a blocking call, and its result goes back. Errors are thrown
into it. `take` runs the steps in the caller's thread; `take_awaited` awaits each of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd_client import dropped
from swapd_client.errors import (
    ComponentInUse,
    DeviceFailed,
    DeviceMemoryExhausted,
    DuplicateName,
    InvalidSource,
    SwapdError,
)
from swapd_client.leases.book import Record
from swapd_client.memory.layout import OtherBytes, Segments
from swapd_client.memory.part import Part
from swapd_client.memory.scratch import Scratch
from swapd_client.session.session import Call, Session

if TYPE_CHECKING:
    import torch

    from swapd_client.weights.load import FileLayout, Rename
    from swapd_client.weights.safetensors import Files

T = TypeVar("T")

#: Seconds that a name may stay taken by what was collected.
AWAIT_S = 5.0
#: Steps that end with a result of this kind.
Steps = Generator[protocol.AnyRequest | Callable[[], Any], Any, T]
#: Sends a request without waiting for the reply. Never by way of the loop.
Tell = Callable[[protocol.AnyRequest], object]


def take(steps: Steps[T], call: Call) -> T:
    """Run all steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                done = call(step) if isinstance(step, msgspec.Struct) else step()
            except BaseException as exc:  # noqa: BLE001 - the steps decide how to go on
                step = steps.throw(exc)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()  # an interrupt may have come between two of them


async def take_awaited(
    steps: Steps[T], call: Callable[[protocol.AnyRequest], Awaitable[protocol.AnyReply]]
) -> T:
    """Run all steps without blocking the loop: blocking ones run in threads."""
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
    finally:
        steps.close()


async def in_thread(
    call: Callable[..., T], *arguments: Any, give_up: Callable[[], None] = lambda: None
) -> T:
    """Call in a thread, and return after it has ended, even when cancelled.

    On cancellation `give_up` makes the call end soon.
    """
    calling = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        give_up()
        while not calling.done():  # a second cancellation must not leave it running
            with suppress(asyncio.CancelledError):
                await asyncio.wait([calling])
        raise


# --- in ------------------------------------------------------------------------------------


def register(
    session: Session,
    tell: Tell,
    name: str,
    source: object,
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    segments: Segments,
    part_of: str,
) -> Steps[Part]:
    """Register one component."""

    prepare = partial(
        session.registry.prepare,
        name,
        source,
        mutable=mutable,
        segments=segments,
        part_of=part_of,
    )
    return (yield from _register_one(session, tell, prepare, policy, group))


def register_scratch(
    session: Session,
    tell: Tell,
    name: str,
    what: "int | torch.Tensor",
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    part_of: str,
) -> Steps[Part]:
    """Register memory that loads as zeros: a number of bytes, or the tensor of former scratch."""
    tensor = None if isinstance(what, int) else what
    nbytes = what if isinstance(what, int) else what.nbytes
    if nbytes <= 0:
        raise InvalidSource(f"scratch of {nbytes} bytes: give a size, as 4 << 30 or '4GiB'")

    def prepare() -> Part:
        gpu = session.processor.index
        kind: protocol.Scratch = "saved" if mutable else "dropped"
        layout = Scratch(nbytes, kind, gpu, tensor, session.processor.fetch)
        stays = tensor is not None
        return session.registry.prepare(name, layout, mutable=True, part_of=part_of, stays=stays)

    return (yield from _register_one(session, tell, prepare, policy, group))


def _register_one(
    session: Session,
    tell: Tell,
    prepare: Callable[[], Part],
    policy: protocol.Policy,
    group: str | None,
) -> Steps[Part]:
    (part,) = yield from _prepared(session, lambda: [prepare()])
    yield from _move_in(session, tell, {part: policy}, group)
    return part


def register_family(
    session: Session,
    tell: Tell,
    name: str,
    sources: Mapping[str, Any],
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    resident_bytes: int | None,
) -> Steps[list[Part]]:
    """Register a component in parts; `resident_bytes` of them are kept on the device."""
    prepare = partial(session.registry.prepare_family, name, sources, mutable=mutable)
    parts = yield from _prepared(session, prepare)
    keeping = partial(protocol.Resize, name=name, resident_bytes=resident_bytes)
    yield from _move_in(session, tell, dict.fromkeys(parts, policy), group, keeping)
    return parts


class Reading(NamedTuple):
    """Safetensors files, and how they are read: arguments of `Client.load`."""

    files: "Files"
    module: "torch.nn.Module | None"
    prefix: str
    rename: "Rename | None"
    dtype: "torch.dtype | None"
    progress: "bool | Callable[[int, int], None] | None"


def load(
    session: Session,
    tell: Tell,
    name: str,
    reading: Reading,
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    segments: Segments,
) -> Steps[Part]:
    """Register tensors of safetensors files as one component."""
    plan = _planned("load", session, reading, None, segments, share=not mutable)
    with ExitStack() as opened:
        layouts = yield partial(opened.enter_context, plan)
        return (
            yield from register(
                session,
                tell,
                name,
                layouts[""],
                policy,
                group,
                mutable=mutable,
                segments=(),
                part_of="",
            )
        )


def load_family(
    session: Session,
    tell: Tell,
    name: str,
    reading: Reading,
    parts: Mapping[str, Iterable[str]],
    policy: protocol.Policy,
    group: str | None,
    *,
    mutable: bool,
    resident_bytes: int | None,
) -> Steps[list[Part]]:
    """As `load`, in parts as of `register_family`."""
    plan = _planned("load_family", session, reading, parts, (), share=not mutable)
    with ExitStack() as opened:
        layouts = yield partial(opened.enter_context, plan)
        return (
            yield from register_family(
                session,
                tell,
                name,
                layouts,
                policy,
                group,
                mutable=mutable,
                resident_bytes=resident_bytes,
            )
        )


def _planned(
    call: str,
    session: Session,
    reading: Reading,
    parts: Mapping[str, Iterable[str]] | None,
    segments: Segments,
    *,
    share: bool,
) -> "AbstractContextManager[dict[str, FileLayout]]":
    """As `weights.load.planned`, for the user's `call`, which needs the packages for it."""
    with needed(call):
        from swapd_client.weights.load import planned

    return planned(
        reading.files,
        reading.module,
        parts,
        prefix=reading.prefix,
        rename=reading.rename,
        dtype=reading.dtype,
        segments=segments,
        gpu=session.processor.index,
        progress=reading.progress,
        share=share,
    )


def register_again(
    session: Session,
    tell: Tell,
    sources: Mapping[str, tuple[object, protocol.Policy]],
    part_of: Mapping[str, str],
) -> Steps[None]:
    """Register components of a lost daemon, by name, at their addresses: all of them or none."""

    def prepare() -> list[Part]:
        prepared: list[Part] = []
        try:
            for name, (source, _) in sources.items():
                family = part_of.get(name, "")
                part = session.registry.prepare(
                    name, source, mutable=False, part_of=family, stays=True
                )
                prepared.append(part)
        except BaseException:
            _discard(session, prepared)
            raise
        return prepared

    parts = yield from _prepared(session, prepare)
    policies = {part: sources[part.name][1] for part in parts}
    yield from _move_in(session, tell, policies, None)


def _prepared(session: Session, prepare: Callable[[], list[Part]]) -> Steps[list[Part]]:
    """Return the parts that `prepare()` makes; discard them if the caller is interrupted."""
    made: list[Part] = []
    try:
        yield lambda: made.extend(prepare())
    except BaseException:
        _discard(session, made)
        raise
    return made


def _move_in(
    session: Session,
    tell: Tell,
    parts: Mapping[Part, protocol.Policy],
    group: str | None,
    keeping: Callable[[int], protocol.Resize] | None = None,
) -> Steps[None]:
    """Have host copies made and filled, and rebind the tensors when all of that succeeded.

    `keeping` makes the request that sets the kept parts of a family; until its grant, all parts
    leave the device at their release.
    """
    registered: list[Part] = []
    try:
        while True:
            try:
                yield from _fill(session, parts, group, keeping, registered)
                break
            except OtherBytes as lie:
                _take_out(session, tell, registered)
                registered.clear()
                session.registry.start_over(parts, lie)
    except BaseException:
        # no steps in here: the caller that runs the steps may be gone
        _take_out(session, tell, registered)
        _discard(session, parts)
        raise
    for part in parts:
        session.registry.bind(part)


def _fill(
    session: Session,
    parts: Mapping[Part, protocol.Policy],
    group: str | None,
    keeping: Callable[[int], protocol.Resize] | None,
    registered: list[Part],
) -> Steps[None]:
    """Register, fill and commit all parts. `registered` collects parts that the daemon knows."""
    registry = session.registry
    for part, policy in parts.items():
        request = partial(
            registry.request, part, policy=policy, group=group, transient=keeping is not None
        )
        try:
            yield request(session.next_id())
        except DuplicateName:
            yield partial(dropped.settle, AWAIT_S)
            yield request(session.next_id())
        registered.append(part)
    for part in parts:
        yield partial(registry.fill, part)
    for part in parts:
        yield protocol.Commit(session.next_id(), part.name)
    if keeping is not None:
        yield keeping(session.next_id())


def _take_out(session: Session, tell: Tell, registered: Sequence[Part]) -> None:
    for part in registered if session.error is None else ():
        with suppress(SwapdError):  # report the first error
            tell(protocol.Unregister(session.next_id(), part.name))


def _discard(session: Session, parts: Iterable[Part]) -> None:
    for part in parts:
        session.registry.discard(part)


# --- out -----------------------------------------------------------------------------------


def unregister(session: Session, name: str) -> Steps[None]:
    """Unregister a component, after the work under released leases is done."""
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
    """Before a client closes: unregister mutable components while the daemon can still save them.

    `release` ends a lease.
    """
    mutable = [part for part in session.registry.all() if part.mutable]
    if session.error is not None or not mutable:
        return
    for record in session.leases:
        if record.state == "held":
            session.leases.mark(record)
            release(record)
    yield session.leases.drain
    for part in mutable:
        # in use by another session, no room, or not savable: its bytes stay where they are
        with suppress(ComponentInUse, DeviceMemoryExhausted, DeviceFailed):
            yield from unregister(session, part.name)
