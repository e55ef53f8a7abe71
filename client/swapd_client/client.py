"""The synchronous client: what a stage calls."""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd.shared.units import parse_size
from swapd_client import moving
from swapd_client.errors import (
    AcquireTimeout,
    ComponentInUse,
    InvalidSettings,
    InvalidSource,
    SessionEnded,
    SwapdError,
)
from swapd_client.faults import explain_if
from swapd_client.lease import Lease
from swapd_client.leases.agents import Agent
from swapd_client.leases.book import Record
from swapd_client.leases.keeper import Keeper
from swapd_client.leases.keeping import Key
from swapd_client.memory.component import Component
from swapd_client.memory.layout import Segments
from swapd_client.memory.sources import Source
from swapd_client.session.channel import Channel, ChannelFactory
from swapd_client.session.endpoint import label_of, resolve
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.session import Session
from swapd_client.session.starting import connected
from swapd_client.tracing import Trace, Tracing, check_installed, tracing_of

if TYPE_CHECKING:
    import torch

    from swapd_client.offload.attachment import Attachment
    from swapd_client.offload.settings import OffloadSettings
    from swapd_client.offload.strategy import Kind
    from swapd_client.weights.safetensors import Files

NOTHING: Mapping[str, Any] = {}
_T = TypeVar("_T")


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
    timeout: float = ANSWER_S,
    faults: Literal["explain"] | None = None,
    start: bool = False,
    budget: int | str | None = None,
    tracing: bool | None = None,
) -> "Client":
    """Connect to the daemon of a device.

    `endpoint` is its runtime folder; without it `$SWAPD_ENDPOINT`, else the default folder
    of `device` ("host" if not given). `label` names this process in the swap log.
    `faults="explain"`: as `explain_faults()`. Blocks for one round trip, in which the daemon may
    let wait for `timeout` seconds at most. Raises: NotRunning, NotAnswering, VersionMismatch,
    DaemonGone.

    `start=True`: if no daemon is there, one is started as this user, with `budget` ("40GiB"; else
    $SWAPD_BUDGET, or the daemon's default), and waited for. It is no part of this process: it
    outlives it while others have sessions, and ends 10 seconds after its last session
    ($SWAPD_LINGER). Processes that start one at once share one. A daemon that is there is used as
    it is, whatever its budget. Raises: StartFailed, with what the daemon said.

    `tracing`: whether an acquire that asks the daemon has an OpenTelemetry span, and in it those of
    the loads and evictions made for it. None: if a span is current and sampled; True: always, by
    the provider of this process; False: never. Raises: MissingExtra, if that is True and the API is
    not installed (the extra `otel`).
    """
    explain_if(faults)
    check_installed(tracing)
    session = open_session(endpoint, device, label, timeout, start=start, budget=budget)
    return Client(session, tracing=tracing)


def open_session(
    endpoint: str | os.PathLike[str] | None,
    device: str | None,
    label: str | None,
    timeout: float,
    *,
    start: bool,
    budget: int | str | None,
) -> Session:
    """That of `connect`, for both clients. Blocks, and raises, as it does."""
    folder = resolve(endpoint, device)
    opened = partial(Session, folder, label_of(label), timeout)
    if start:
        return connected(folder.absolute(), device, budget, opened)
    if budget is not None:
        raise InvalidSettings("budget= is that of a daemon to be started: say start=True, too")
    return opened()


class Client:
    """A session with one daemon. May be used from any thread; not across a fork.

    Made by `connect`. `close` it, or use it in a `with` block: its components then become
    ordinary private memory, with the weights in them.
    """

    def __init__(
        self,
        session: Session,
        factory: ChannelFactory | None = None,
        *,
        tracing: "bool | Tracing | None" = None,
    ) -> None:
        """`factory`, and a `Tracing`: those of an async client of the same session."""
        self.session = session
        self._tracing = tracing_of(session, tracing)
        self._factory = factory or ChannelFactory(session)
        self._keeper = Keeper(session.told, self._end, session.processor.after)
        session.told.when_wanted(self._keeper.hurry)
        session.life.when_ended(self._keeper.forget)
        close = partial(_close_late, self._keeper, session, self._factory, self._tracing)
        self._dropped = weakref.finalize(self, session.leave_behind, close)
        self._dropped.atexit = False
        self._local = threading.local()
        #: By id. Their models keep them: see `offload/dropped.py`.
        self._attachments: weakref.WeakValueDictionary[int, Attachment] = (
            weakref.WeakValueDictionary()
        )

    def __repr__(self) -> str:
        return f"<Client session={self.session.welcome.session} at {self.session.endpoint}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def register(
        self,
        name: str,
        source: Source,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
        part_of: str = "",
    ) -> Component:
        """Move a component's weights into swapd, and leave the tensors where they are used.

        `source` is a module (its parameters; buffers stay private), or a dict of tensors or
        of buffers. Every byte is copied once, into the host copy; then each tensor's storage
        is the component's address range, for good, and the old memory is free. From here on
        the bytes may be touched under a lease only, and only read unless `mutable`.

        `policy`: "lru", "permanent" (never evicted once in), "sequential" (dropped when
        released), or "alternating" with a `group` whose members exclude each other.

        `segments`: lists of names, or of what they are part of ("layers.0"), in the order in
        which they are needed: `lease.wait(i)` waits for the first i + 1. What no list names is
        in the first.

        `part_of` names a family, which then stands for all its parts: they may be on the device
        together though they are of one alternating group.

        On a GPU the tensors may be there or on the CPU, and are there afterwards; a module's
        buffers go there too, and stay private. The memory they had is the driver's again.

        What was registered with a daemon that is gone, and is private memory since `close`, keeps
        its addresses when it is registered with the next, as the same component. So do tensors
        that share its memory: they are to be touched under a lease again, too.

        What is in a component already, of any client of this process, is refused by that one's name
        (InvalidSource).

        Blocks for the copy. Raises: DuplicateName, TooLarge, HostMemoryExhausted,
        InvalidSource, DeviceUnavailable, SessionEnded; after any of them the source is as it was.
        """
        steps = moving.register(
            self.session,
            self._call,
            name,
            source,
            policy,
            group,
            mutable=mutable,
            segments=segments,
            part_of=part_of,
        )
        return Component(self._take(steps))

    def register_family(
        self,
        name: str,
        parts: Mapping[str, Source],
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
    ) -> list[Component]:
        """Register a component in parts, which come and go one by one: `<name>/<key of parts>`.

        Give them in the order in which they are needed. `name` stands for all of them in
        `acquire`, `prefetch` and `unregister`. `policy` and `group` are those of the parts that
        are kept: `resident` bytes of them, as with `resize`; the others leave the device
        when they are released. One that is called "rest" is kept before all others.

        Tensors that parts share must be in one of them only. Blocks, and raises, as `register`;
        after an error all sources are as they were.
        """
        steps = moving.register_family(
            self.session,
            self._call,
            name,
            parts,
            policy,
            group,
            mutable=mutable,
            resident_bytes=nbytes_of(resident),
        )
        return [Component(part) for part in self._take(steps)]

    def register_scratch(
        self,
        name: str,
        size: "int | str | torch.Tensor",
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        part_of: str = "",
    ) -> Component:
        """Register `size` bytes ("4GiB") of memory that is filled with nothing: a KV cache, say.

        `component.tensor` is all of it, at an address that stays; it may be read and written under
        a lease only. It comes in as zeros, and is dropped when it is evicted: nothing is copied,
        and there is no host copy. `lease.fresh(name)` says whether it has been since. With
        `mutable` its contents are saved and restored, or what `component.used` says of them, and
        the host has as much memory for it. Weights and scratch are leased together as any
        components are, all or none.

        Instead of a size, the tensor of scratch that lost its daemon: it stays where it is; with
        `mutable` its contents go with it, else they begin anew.

        `policy`, `group`, `part_of`, errors: as of `register`. After `unregister` or `close` its
        memory is private: what was saved last, or zeros.
        """
        what = nbytes_of(size)
        steps = moving.register_scratch(
            self.session,
            self._call,
            name,
            what,
            policy,
            group,
            mutable=mutable,
            part_of=part_of,
        )
        return Component(self._take(steps))

    def _register_again(
        self,
        sources: Mapping[str, tuple[Source, protocol.Policy]],
        part_of: Mapping[str, str] = NOTHING,
    ) -> None:
        """Register what lost its daemon with this one, by name, each where it lies.

        `part_of`: by name, the family of those that are parts of one. All of them or none. Blocks,
        and raises, as `register`; InvalidSource if one would move.
        """
        self._take(moving.register_again(self.session, self._call, sources, part_of))

    def load(
        self,
        name: str,
        files: "Files",
        module: "torch.nn.Module | None" = None,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
        prefix: str = "",
        rename: Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> Component:
        """Register what safetensors files have, read straight into swapd: never held twice.

        `files`: a file, several, a folder, or an index (`model.safetensors.index.json`). Of their
        tensors those are taken that begin with `prefix`, without it, and called as `rename` says
        (None: left out). `dtype` is what floating-point numbers are cast to, from 16 bits up.

        With a `module`, on the meta device or not, its parameters become these tensors: ties are
        kept, and what the files lack is an error that names it. Buffers are loaded too, and stay
        private. Without one, `component.tensors` has them by name. `policy`, `group`, `mutable`
        and `segments` are those of `register`.

        Another process that loads the same from the same files shares the bytes, unless `mutable`.
        It compares each of them with the files first, and shares nothing if one is another.
        `progress`: True for a bar (tqdm), or a callable that is told `(done, total)` in bytes;
        without it there is a bar if somebody looks at stderr.

        Blocks until all is read. Raises what `register` raises, InvalidSource also for files that
        are damaged or do not fit the module; the module is then as it was.
        """
        with needed("load"):
            from swapd_client.weights import load

        with load.planned(
            files,
            module,
            None,
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            segments=segments,
            gpu=self.session.processor.index,
            progress=progress,
            share=not mutable,
        ) as layouts:
            return self.register(name, layouts[""], policy=policy, group=group, mutable=mutable)

    def load_family(
        self,
        name: str,
        files: "Files",
        parts: Mapping[str, Iterable[str]],
        module: "torch.nn.Module | None" = None,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
        prefix: str = "",
        rename: Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> list[Component]:
        """As `load`, in parts as of `register_family`.

        `parts` has for each the names of its tensors, or of what they are in ("blocks.0"); what
        none of them names is in the one that is called "rest".
        """
        with needed("load_family"):
            from swapd_client.weights import load

        with load.planned(
            files,
            module,
            parts,
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            segments=(),
            gpu=self.session.processor.index,
            progress=progress,
            share=not mutable,
        ) as layouts:
            return self.register_family(
                name, layouts, policy=policy, group=group, mutable=mutable, resident=resident
            )

    def resize(self, name: str, size: int | str | None, *, timeout: float | None = None) -> None:
        """Keep `size` bytes ("5.6GiB") of a family on the device; the rest of it passes through.

        What is in no block is kept first, then as many blocks as fit, evenly spread; but so many
        that another has room to pass through. None: as much as leaves room for two. Takes effect at
        once, but for what is held. Does not block. Raises: UnknownComponent if `name` was not
        registered in parts; TooLarge if what is in no block is "permanent", and cannot be;
        NotAnswering if the daemon is silent for `timeout` seconds.
        """
        self._flush_kept()  # nobody uses it
        self._question(protocol.Resize(self.session.next_id(), name, nbytes_of(size)), timeout)

    def pin(self, name: str, *, timeout: float | None = None) -> None:
        """Keep a component, or what is kept of a family, on the device once it is in.

        Until `unpin`, until it is unregistered, or until somebody asks for what would never fit
        beside it; also if this session ends. Brings nothing in: see `prefetch`. Does not block.

        Raises: UnknownComponent; TooLarge if another component, or whoever waits, would not fit
        beside it; Conflict for a member of an alternating group; ComponentInUse while it is
        leaving; NotAnswering as `resize`.
        """
        self._question(protocol.Pin(self.session.next_id(), name), timeout)

    def unpin(self, name: str, *, timeout: float | None = None) -> None:
        """It may be evicted again. Raises: Conflict if it was registered as "permanent"."""
        self._question(protocol.Pin(self.session.next_id(), name, unpin=True), timeout)

    def evict(self, name: str, *, timeout: float | None = None) -> None:
        """Have an idle component, or the parts of a family, leave the device at once.

        Returns when that is decided; what is to be saved is saved then. Nothing happens if it is
        out. What another process keeps for its next step (half a second at most) is leased, too.
        Does not block. Raises: UnknownComponent; ComponentInUse if it is leased, coming in, or
        waited for; Conflict if it is pinned or "permanent"; NotAnswering as `resize`.
        """
        self._flush_kept()  # nobody uses it
        self._question(protocol.EvictNow(self.session.next_id(), name), timeout)

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
    ) -> Lease:
        """Wait until all of `names` are on the device, and hold them there.

        All or none. `timeout` in seconds; higher `priority` goes first; `await_registration` also
        waits for names that nobody has registered yet. With `early` it returns as soon as all
        copies are ordered: touch nothing of this process's components before `lease.wait(segment)`
        says that it is there. May be nested, and called from any thread.

        Raises: UnknownComponent, TooLarge, Conflict, WouldDeadlock, AcquireTimeout,
        ComponentGone, DeviceFailed, SessionEnded; then nothing is held.
        """
        session, key = self.session, (threading.get_ident(), names)
        if not session.life.usable:  # first: after a fork the keeper's lock may be held for good
            session.check()
        kept = self._keeper.take(key)
        if kept is not None:
            if not kept.outdated:
                return Lease(self, session, kept, key)
            self._end(kept, ack=False)  # its bytes are others by now

        def ask(request: int, agent: int) -> protocol.Acquire:
            at_once = early or session.processor.works_late
            return protocol.Acquire(
                request, names, agent, timeout, priority, await_registration, at_once
            )

        record = self._acquire(ask, names, timeout, early=early)
        record.may_be_kept = record.lingers = session.leases.may_be_kept(record)
        return Lease(self, session, record, key)

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Lease:
        """Have `size` bytes ("6GiB") of device memory given to this process's own allocator.

        For loading a model, capturing graphs, a VAE decode. Idle components make room. On release
        torch's cache is emptied, and the memory is swapd's again as soon as the driver has it
        back: so drop your tensors before. Rounded up to whole chunks.

        Blocks as `acquire`, and raises what it raises.
        """
        nbytes = nbytes_of(size)

        def ask(request: int, agent: int) -> protocol.AcquireWorkspace:
            return protocol.AcquireWorkspace(request, nbytes, agent, timeout, priority)

        names = (f"workspace of {size}",)
        record = self._acquire(ask, names, timeout, is_workspace=True)
        return Lease(self, self.session, record, (threading.get_ident(), names))

    def acquire_start(self, *, timeout: float | None = None) -> Lease:
        """Wait until no other process starts on this device, and have it so until the release.

        For an engine that sizes its caches by what the device has free: hold it from before that
        is looked at until all is allocated, and each that does so measures itself alone. It holds
        no memory; what is acquired meanwhile is granted as ever. A process that ends has started.

        Blocks, for `timeout` seconds at most. Raises: Conflict if this client holds a lease, or
        starts already; AcquireTimeout, which says who starts; SessionEnded.
        """
        self._flush_kept()

        def ask(request: int, agent: int) -> protocol.AcquireStart:
            return protocol.AcquireStart(request, timeout)

        names = (protocol.THE_START,)
        record = self._acquire(ask, names, timeout)
        return Lease(self, self.session, record, (threading.get_ident(), names))

    def prefetch(self, *names: str, over: Collection[str] | None = None) -> None:
        """Ask for components to be brought in when there is room nobody waits for.

        Does not wait for the copy, takes no lease, promises nothing. Room is made of what is idle;
        with `over`, of these components and families alone, once they are idle, and names that are
        not registered are left out.
        """
        self._call(prefetch_of(self.session.next_id(), names, over))

    def unregister(self, name: str) -> None:
        """Take a component back: its tensors become private memory, addresses and values kept.

        On the host that memory is its host copy, and is freed with the last of its tensors and
        views; who has an address alone has nothing. `status().private_bytes` counts what is left.

        A family is taken back part by part: after an error, what was taken back by then stays so.

        On a GPU that is memory beside swapd's; it blocks for the copy. Raises: ComponentInUse if
        anybody leases it, DeviceMemoryExhausted if the GPU has no room for it (then it stays
        registered), UnknownComponent, SessionEnded.
        """
        for part in self.session.registry.family(name) or [name]:
            self._flush_kept()
            self._take(moving.unregister(self.session, part))

    def _refuse_in_use(self, names: Collection[str]) -> None:
        """Raise ComponentInUse if anybody leases one of these: it cannot be unregistered now."""
        if not names:
            return
        self._flush_kept()
        self.session.leases.drain()
        for component in self.status().components:
            if component.leases and component.name in names:
                raise ComponentInUse(
                    f"{component.name!r} is leased by {', '.join(component.holders)}; release it, "
                    "then detach"
                )

    def attach(
        self,
        model: object,
        components: str | Sequence[str] | None = None,
        *,
        settings: "OffloadSettings | None" = None,
        prefix: str = "",
        policy: protocol.Policy = "lru",
        resident: int | str | Mapping[str, int | str] | None = None,
        blocks: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        wrap_methods: Mapping[str, Sequence[str]] | Sequence[str] = (),
        extra_tensors: Sequence[str] = (),
        kinds: "Mapping[str, Kind]" = NOTHING,
        stay: Sequence[str] = (),
        trainable: bool | str | Sequence[str] | None = None,
        **flags: Any,
    ) -> "Attachment":
        """Register a model's components, and bring each in around whatever runs it.

        `model`: a module, a pipeline that has `components` or a `model`, or a dict of names and
        modules.
        `components`: paths ("thinker", "thinker.visual": the outer one has what is not in the
        inner), patterns ("visual.*": the outermost that match), or "." for the whole model; a usual
        name ("visual") is found wherever it is. Without it, what takes turns in the model, by its
        names, configs and sizes (`offload/automatic.py`); if they do not say, the whole model.
        `prefix` goes before their names in the daemon: "flux" makes "flux.vae".

        How they share the device: `policy` (as in `register`; "alternating": these exclude each
        other), or `settings`, or the settings themselves (`cpu_offload_strategy="sequential"`, see
        `offload/settings.py`). `resident` streams a component block by block and keeps so many
        bytes of it in ("5.6GiB"); `blocks`: the paths of its blocks, or of lists of them. Both are
        for the DiT, or what else is worth it, or by component; see also `resize`.

        `wrap_methods`: methods that use a component's weights, beside the public ones of its own
        class; by component, or for all that have them. `extra_tensors`: names or patterns of
        tensors that are neither parameters nor buffers, and never change. `kinds`: which are a
        "dit", an "encoder", a "vae", where that is not their name. `stay`: components that are
        never evicted once in, whatever is said of the others.

        `trainable`: parameters that stay in private memory, for weights in swapd are read-only:
        names or patterns ("*.lora_*"), True for all that require gradients, False for none. Without
        it, in grad mode, those that require gradients of a component most of which does not.

        What was attached by a client whose daemon is gone keeps its addresses when the next client
        attaches it with the same arguments; close the first one before.

        It is attached until `detach` or `close`, or until the model is garbage; the attachment need
        not be kept, and keeps the model if it is.

        Blocks for the copies. All of it is attached, or nothing. Raises: InvalidSource, which names
        what cannot be attached, InvalidSettings, and as `register`.
        """
        with needed("attach"):
            from swapd_client.offload.attaching import Arguments, attach, chosen
            from swapd_client.offload.strategy import How

        settings = chosen(settings, flags)
        if settings is not None and policy != "lru":
            raise InvalidSource(
                f"policy={policy!r} and settings: each says how components share the device; give "
                "one of them"
            )
        if components is None and settings is not None:
            components = settings.cpu_offload_components
        arguments = Arguments(
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
        attachment = attach(self, model, arguments)
        self._attachments[id(attachment)] = attachment
        return attachment

    def _forget(self, attachment: "Attachment") -> None:
        """It is detached."""
        self._attachments.pop(id(attachment), None)

    def forecast(self, *names: str, timeout: float | None = None) -> protocol.ForecastReply:
        """What `acquire(*names)` would do now: bytes, victims, whom it waits for, seconds.

        Changes nothing, and promises nothing either: others may come first. Raises what the
        acquire would raise at once; NotAnswering if the daemon is silent for `timeout` seconds.
        """
        reply = self._question(protocol.Forecast(self.session.next_id(), names), timeout)
        assert isinstance(reply, protocol.ForecastReply)
        return reply

    def update(self, name: str, values: Mapping[str, Any]) -> None:
        """Give a clean component, or parts of a family, new values: a state dict, or part of one.

        `values` are tensors (or buffers, where buffers were registered) by the names of those that
        were registered, of their shapes and dtypes; what is not named stays as it is. They are
        written to a new host copy beside the old one, which takes its place in one step. Who holds
        the component goes on with the old bytes until it releases; every acquire that comes after
        this waits for the new ones, of all parts of a family, however leases of other threads and
        processes overlap. Only a thread that holds it already takes the old bytes again, until it
        has released all of them; and so do threads of one process that would wait for each other
        for ever. So do not wait, under a lease, for another thread to acquire the same component.
        What `attach` streams changes between two calls: this waits for those under way.

        Values that are in a component themselves are read under its lease. Blocks for the copies,
        and needs host memory for a second host copy meanwhile. Raises: InvalidSource, naming the
        first value that does not fit, or that no lease holds; BadRequest for a mutable
        component, which is written to under a lease; HostMemoryExhausted, ComponentInUse if
        another thread updates it; UnknownComponent, SessionEnded. After any of them nothing
        changed.
        """
        with ExitStack() as stack:
            for attachment in list(self._attachments.values()):
                stack.enter_context(attachment._between_passes(name))
            self._update_together({name: values})

    def _update_together(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """As `update`, of several components or families: all of them change in one step.

        Who acquires them together has the new values of all, or the old ones. A pass that holds a
        family part by part may have both.
        """
        from swapd_client.weights import update

        asked = [
            change
            for name, named in values.items()
            for change in update.changes(self.session, name, named)
        ]
        update.apply(self.session, self._call, asked)
        self._keeper.flush_all()

    def status(self, *, timeout: float | None = None) -> protocol.StatusReply:
        """What is on the device, who holds it, and how much was moved.

        Raises: NotAnswering if the daemon is silent for `timeout` seconds.
        """
        reply = self._question(protocol.Status(self.session.next_id()), timeout)
        assert isinstance(reply, protocol.StatusReply)
        return reply

    def close(self, *, keep: bool = True) -> None:
        """End the session. Registered tensors become private memory; leases are over.

        Without `keep` nothing is copied, and these tensors must not be touched any more. On a GPU
        it waits for the work under leases that were released. When it returns the daemon knows that
        this process can write to nothing of its memory any more. If the GPU has no room for private
        copies, it warns of the components whose tensors are nowhere any more.
        """
        session = self.session
        if not session.forked:  # else all of it is the parent's, locks that somebody held too
            self._keep_no_more()
            session.leases.drain()
            if keep:
                with suppress(SessionEnded):  # then their last bytes are where they were
                    self._take(moving.take_back_mutable(session, self._end))
        session.close(keep=keep)
        self._let_go()
        if not session.forked:
            self._factory.close()
            self._tracing.close()

    def _keep_no_more(self) -> None:
        """It is being closed: leases that loops keep are given back."""
        self._dropped.detach()
        self._keeper.close()

    def _let_go(self) -> None:
        """It is closed: models that were attached are as they were."""
        self._dropped.detach()
        for attachment in list(self._attachments.values()):
            attachment._let_go()

    def _take(self, steps: moving.Steps[_T]) -> _T:
        return moving.take(steps, self._call)

    def _channel(self) -> Channel:
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = Channel(self._factory)
        return channel

    def _call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        self.session.check()
        self._end_kept()
        self._keeper.hand_over()
        return self.session.unwrap(self._channel().call(request, timeout_s))

    def _question(self, request: protocol.AnyRequest, timeout_s: float | None) -> protocol.AnyReply:
        """As `_call`, of what the daemon answers at once. Raises: NotAnswering if it does not."""
        if timeout_s is None:
            return self._call(request)
        self.session.check()
        self._end_kept()
        self._keeper.hand_over()
        channel = self._channel()
        channel.ask(request)
        reply = channel.collect(request.id, timeout_s)
        if reply is None:
            channel.abandon(request.id)
            raise self.session.not_answering(timeout_s)
        return self.session.unwrap(reply)

    def _acquire(
        self,
        ask: Callable[[int, int], protocol.AnyAcquire],
        names: tuple[str, ...],
        timeout: float | None,
        *,
        is_workspace: bool = False,
        early: bool = False,
        in_place_of: int | None = None,
    ) -> Record:
        """Have `ask(id, agent)` granted, and what was granted mapped and, unless `early`, there."""
        self.session.check()
        if self.session.processor.works_late:
            for end in self._keeper.returned():
                end(self._give_back_here)
        self._end_kept()  # first: whoever still holds something is the same agent
        asked = partial(
            self._acquire_now,
            ask,
            names,
            timeout,
            is_workspace=is_workspace,
            early=early,
            in_place_of=in_place_of,
        )
        trace = self._tracing.begin(names)
        if trace is None:
            return asked(None)
        with trace:
            return asked(trace)

    def _acquire_now(
        self,
        ask: Callable[[int, int], protocol.AnyAcquire],
        names: tuple[str, ...],
        timeout: float | None,
        trace: Trace | None,
        *,
        is_workspace: bool,
        early: bool,
        in_place_of: int | None,
    ) -> Record:
        session = self.session
        agent = session.leases.enter(threading.get_ident(), timeout)
        request = ask(session.next_id(), agent.number)
        if trace is not None:
            request = trace.marked(request)
        reply = self._channel().call(request, timeout, in_place_of=in_place_of)
        if trace is not None:
            trace.answered(reply)
        record = self._granted(reply, names, agent, is_workspace=is_workspace)
        self._show(record, timeout, early=early)
        return record

    def _granted(
        self,
        reply: protocol.AnyReply,
        names: tuple[str, ...],
        agent: Agent,
        *,
        is_workspace: bool = False,
    ) -> Record:
        """What was granted to `agent`, held."""
        granted = self.session.unwrap(reply)
        assert isinstance(granted, protocol.Granted)
        record = self.session.leases.record(granted, names, agent, is_workspace=is_workspace)
        with self._or_ended(record):
            self.session.leases.add(record)
        return record

    def _show(self, record: Record, timeout: float | None = None, *, early: bool) -> None:
        """Have what was granted mapped, and, unless it is `early`, wait until it is there."""
        with self._or_ended(record):
            if early:
                self.session.leases.show(record)
            else:
                self.session.leases.bring_in(record, timeout)

    @contextmanager
    def _or_ended(self, record: Record) -> Iterator[None]:
        """If that fails, the lease ends."""
        try:
            yield
        except BaseException:
            with suppress(SwapdError):
                self._end(record, ack=False)
            raise

    def _ask(self, *names: str) -> int:
        """Ask for components ahead, and go on; to be collected or abandoned in this thread.

        Nobody waits for them, and what this thread holds it may release meanwhile. So they are
        asked for by an agent of their own: no deadlock is seen where there is none.
        """
        request = self.session.next_id()
        self._channel().ask(protocol.Acquire(request, names, _agent_ahead(request), early=True))
        return request

    def _collect(self, request: int, *names: str, within_s: float) -> Lease | None:
        """The lease that was asked for, granted early; None if it is not granted within that.

        Raises what `acquire` raises. Who is going to wait must not go on asking for it: but
        abandon it, or acquire in its place.
        """
        reply = self._channel().collect(request, within_s)
        if reply is None:
            return None
        number = _agent_ahead(request)
        record = self._granted(reply, names, Agent(number, number))
        self._show(record, early=True)
        return Lease(self, self.session, record, (threading.get_ident(), names))

    def _acquire_in_place_of(self, request: int, *names: str) -> Lease:
        """As `acquire`, early, of what was asked ahead and was not collected.

        The daemon hears first that this thread waits for it, then that nothing is asked ahead any
        more: so what it has brought in meanwhile stays, where it would leave when nobody wants it.
        """

        def ask(number: int, agent: int) -> protocol.Acquire:
            return protocol.Acquire(number, names, agent, early=True)

        record = self._acquire(ask, names, None, early=True, in_place_of=request)
        record.may_be_kept = self.session.leases.may_be_kept(record)
        return Lease(self, self.session, record, (threading.get_ident(), names))

    def _hint(self, *names: str, over: Collection[str] | None = None) -> None:
        """As `prefetch`, and nobody hears what becomes of it. Blocks as `Channel.send`."""
        self._channel().send(prefetch_of(self.session.next_id(), names, over))

    def _release(self, record: Record, key: Key) -> None:
        same = key[0] == threading.get_ident()
        keeps = same and record.may_be_kept and self.session.life.usable
        if keeps and self._keeper.keep(key, record):
            return
        self._end(record, ack=not same)  # sent on another channel it may come late, so then wait

    def _flush_kept(self) -> None:
        """End what any thread kept. Raises what `Session.check` does."""
        self.session.check()  # first: after a fork the keeper's lock may be held for good
        self._keeper.flush_all()

    def _end_kept(self) -> None:
        """End what this thread kept; the daemon hears of it before what is sent next."""
        for record in self._keeper.pop(threading.get_ident()):
            self._end(record, ack=False)

    def _end(self, record: Record, ack: bool = True) -> None:
        """Tell the daemon that a lease ends, from any thread, once its GPU work is done."""
        linger = None if ack else self._keeper.linger
        if not self.session.leases.ends_later(record, self._give_back, linger):
            self._give_back(record, ack)

    def _give_back_here(self, record: Record) -> None:
        """In the thread whose lease it was: the daemon hears of it before what that sends next."""
        self._give_back(record, ack=False)

    def _give_back(self, record: Record, ack: bool = True) -> None:
        session = self.session
        if not session.leases.give_back(record):
            return
        release = session.leases.release_of(record, session.next_id(), ack=ack)
        # it may be waited for under a lock: a daemon that is stopped must not hold us up for ever
        with suppress(SessionEnded, AcquireTimeout):
            if ack:
                self._channel().call(release, 0.0)
            else:
                self._channel().send(release)


def _close_late(
    keeper: Keeper, session: Session, factory: ChannelFactory, tracing: Tracing
) -> None:
    """Close a client that was dropped when its session had ended."""
    keeper.close()
    session.close()
    factory.close()
    tracing.close()


def prefetch_of(
    number: int, names: tuple[str, ...], over: Collection[str] | None
) -> protocol.Prefetch:
    return protocol.Prefetch(number, names, None if over is None else tuple(over))


def nbytes_of(size: object) -> Any:
    """Bytes, as a number or in words ("6GiB"); what is no text is given back."""
    return parse_size(size) if isinstance(size, str) else size


_Names = TypeVar("_Names")


def _listed(names: _Names) -> _Names:
    """One name is meant as a list of it, not as its letters."""
    return cast("_Names", [names]) if isinstance(names, str) else names


def _agent_ahead(request: int) -> int:
    """The agent that asks ahead: no thread has its number."""
    return -request
