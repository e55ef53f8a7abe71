"""The synchronous client."""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd_client import registration, rejoining
from swapd_client.checks import A_SIZE, Uncopied, check, check_name
from swapd_client.errors import DaemonGone, SessionEnded
from swapd_client.faults import explain_if
from swapd_client.finalizers import close_when_collected
from swapd_client.lease import Lease
from swapd_client.lease_request import (
    PREFETCH_TIMEOUT_S,
    Progress,
    cheapest_first,
    each_once,
    nbytes_of,
    of_start,
    of_workspace,
    prefetch_of,
)
from swapd_client.leasing import Leasing
from swapd_client.memory.component import Component
from swapd_client.memory.layout import Segments
from swapd_client.memory.part import Part
from swapd_client.memory.sources import Source
from swapd_client.session.channel import ChannelFactory
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.session import Session
from swapd_client.session.starting import open_session, seconds_to_wait
from swapd_client.tracing import check_installed, tracing_of

if TYPE_CHECKING:
    import torch

    from swapd_client.offload.attachment import Attachment
    from swapd_client.offload.settings import OffloadSettings
    from swapd_client.offload.strategy import Kind
    from swapd_client.weights.safetensors import Files

NOTHING: Mapping[str, Any] = {}


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
    timeout: float = ANSWER_S,
    faults: Literal["explain"] | None = "explain",
    start: bool = False,
    budget: int | str | None = None,
    tracing: bool | None = None,
    disabled: bool | None = None,
    reconnect: float | None = None,
) -> "Client":
    """Connect to the daemon of a device.

    `endpoint` is a device ("cuda:0", "host"), as is `device=`, or the runtime folder of a daemon
    (write "./host" for a folder of such a name). Without a folder, the daemon is that of
    `$SWAPD_ENDPOINT` if that is set, else the one in the device's default folder. Without a device,
    it is this user's only daemon; if none runs, the one that `swapd serve` would start. `label`
    names this process in the swap log. By default an access outside of a lease names its component
    before the process dies (`explain_faults()`); with `faults=None` it does not. Blocks for one
    round trip, `timeout` seconds at most. Raises: NotRunning, Timeout, VersionMismatch, DaemonGone,
    and InvalidArgument, also if several daemons run.

    `start=True`: if no daemon runs there, start one as this user, with `budget` ("40GiB"; else
    $SWAPD_BUDGET, or the daemon's default), and wait for it. The daemon is not tied to this
    process: it stays while any process has a session, and ends 10 seconds after its last session
    ($SWAPD_LINGER). Processes that start a daemon at the same time share it. A running daemon is
    used as it is, with its own budget. Raises: NotRunning, with the daemon's own message.

    `tracing`: whether each acquire that asks the daemon gets an OpenTelemetry span, which contains
    the spans of the loads and evictions made for it. None: if a span is current and sampled; True:
    always, with the provider of this process; False: never. Raises: MissingExtra, if `tracing` is
    True and the OpenTelemetry API is not installed (the extra `otel`).

    `disabled`: do without swapd, for tests and comparisons. No daemon is needed, or started. The
    calls do the same on this process's own memory, to which tensors move when they are registered:
    everything is loaded at once, and nothing waits. That memory is on the GPU that `device` names,
    else $SWAPD_DEVICE, else on the host. `attach` installs no hooks; `update` writes at once. None:
    if $SWAPD_DISABLE is 1 or true.

    `reconnect`: seconds that a call waits for the next daemon when the daemon is gone (or its own
    `timeout`, if that is shorter). The client then registers all that it has again, at the same
    addresses, and the call goes on. The call also waits until no lease is in use, but raises
    DaemonGone at once if its own thread holds a lease. A call during which the daemon dies is
    repeated; calls that register or unregister raise DaemonGone. If no daemon comes, the call
    raises NotRunning, or Timeout if the next daemon falls silent, and the next call tries again.
    With `start`, the client starts a daemon, and waits for it as `connect` does. 0 or False:
    DaemonGone at once, except that a client with an attached model joins a running daemon. None, or
    True: $SWAPD_RECONNECT, else 30 seconds.
    """
    explain_if(faults)
    check_installed(tracing)
    reconnect_s = seconds_to_wait(reconnect)
    session = open_session(endpoint, device, label, timeout, disabled, start=start, budget=budget)
    try:
        return Client(session, tracing=tracing, reconnect_s=reconnect_s)
    except BaseException:
        session.close()  # its thread would keep it
        raise


class Client(Uncopied, AbstractContextManager["Client"]):
    """A session with one daemon. May be used from any thread, but not across a fork.

    Made by `connect`. Call `close`, or use it in a `with` block: its components then become private
    memory, which keeps their weights. A client that is garbage-collected is closed too, once none
    of its leases is in use. An attached model keeps its client alive.
    """

    def __init__(
        self, session: Session, *, tracing: bool | None = None, reconnect_s: float = 0.0
    ) -> None:
        self._tracing = tracing
        #: Seconds that a call waits for the next daemon.
        self.reconnect_s = reconnect_s
        self.leasing = self._leasing_of(session)
        #: Closes the client when it is collected.
        self.dropped = self._close_when_collected(self.leasing)
        #: Kept alive by the attached models: see `take_back_if_dropped`.
        self.attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
        #: Called when a call of an attached model finds that the session has ended. It must close
        #: the client, or raise. None: the client joins the next daemon.
        self.when_gone: Callable[[SessionEnded], None] | None = None
        #: Held by the thread that joins the next daemon; and whether the client joins no daemon any
        #: more.
        self.joining = threading.Lock()
        self.stays = False
        #: The thread that closes the client in place of a signal handler.
        self._closer: threading.Thread | None = None

    @property
    def session(self) -> Session:
        """The session. When the client joins the next daemon, another one takes its place."""
        return self.leasing.session

    def __repr__(self) -> str:
        return f"<Client session={self.session.welcome.session} at {self.session.endpoint}>"

    def __exit__(self, *_: object) -> None:
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
        """Move a component's weights into swapd; its tensors stay usable in place.

        `source` is a module (its parameters; buffers stay private), or a dict of tensors or of
        buffers. Every byte is copied once, into the host copy. Each tensor's storage then becomes
        the component's address range, for as long as the tensor exists, and the old memory is
        freed. From then on, access the bytes under a lease only, and write to them only if
        `mutable`.

        `policy`: "lru", "permanent" (never evicted once loaded), "sequential" (evicted when
        released), or "alternating" with a `group`: at most one member of the group is on the
        device.

        `segments`: lists of names, or of modules with them ("layers.0"), in the order of use:
        `lease.wait(i)` waits for the first i + 1 segments. Tensors that no list names are in the
        first.

        `part_of` names a family, which stands for all its parts. Parts of one family may be on the
        device together even if they are in one alternating group.

        On a GPU the tensors may start on the GPU or on the CPU, and end on the GPU. A module's
        buffers move to the GPU too, and stay private. The driver gets the tensors' old memory back.

        Components with the same bytes share one host copy, in all processes, once all bytes have
        been compared; not `mutable` ones, and not tensors that start on a GPU.

        Tensors of a lost daemon whose client is closed keep their addresses when you register them
        with the next daemon as the same component. Tensors that share their memory then need a
        lease again, too.

        A tensor that is already in a component of any client of this process is refused
        (InvalidSource); the error names that component.

        Blocks for the copy. Raises: DuplicateName, TooLarge, OutOfMemory, InvalidSource,
        DeviceFailed, SessionEnded; after any of them the source is unchanged.
        """
        registry = self._joined().registry
        return self._register(
            lambda: registry.prepare(
                name,
                source,
                mutable=mutable,
                segments=segments,
                part_of=part_of,
                policy=policy,
                group=group,
            )
        )

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
        """Register a component in parts that load and leave one by one: `<name>/<key of parts>`.

        Give the parts in the order of use. `name` stands for all of them in `acquire`, `prefetch`
        and `unregister`. `policy` and `group` apply to the parts that are kept: `resident` bytes of
        them, as with `resize`. The other parts leave the device when they are released. A part
        named "rest" is kept before all others.

        Tensors that several parts share must be in one part only. Blocks and raises as `register`;
        after an error all sources are unchanged.
        """
        how = {"mutable": mutable, "policy": policy, "group": group}
        self._joined()
        return self._register_family(name, parts, resident, **how)

    def _register_family(
        self, name: str, parts: Mapping[str, Any], resident: int | str | None, **how: Any
    ) -> list[Component]:
        check_name(name)
        nbytes = nbytes_of(resident)
        check("resident", nbytes, int | None, A_SIZE)
        prepare = partial(self.session.registry.prepare_family, name, parts, **how)
        return registration.register(self.leasing, prepare, {name: nbytes})

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
        """Register `size` bytes ("4GiB") of memory without initial contents, such as a KV cache.

        `component.tensor` is all of it, at a fixed address; read and write it under a lease only.
        Loading fills it with zeros, and evicting drops its contents: nothing is copied, and there
        is no host copy. `lease.fresh(name)` tells whether the contents were dropped. With
        `mutable`, eviction saves the contents (or the part that `component.used` gives) and loading
        restores them, and the host needs as much memory. A lease can hold weights and scratch
        together, all or none.

        `size` may also be the tensor of scratch whose daemon was lost: it keeps its address. With
        `mutable` it keeps its contents, else they start as zeros.

        `policy`, `group`, `part_of` and errors: as of `register`. After `unregister` or `close` the
        memory is private: it holds the contents last saved, or zeros.
        """
        session = self._joined()
        scratch = registration.scratch_of(session, nbytes_of(size), mutable=mutable)
        how = {**scratch, "policy": policy, "group": group, "part_of": part_of}
        return self._register(lambda: session.registry.prepare(name, **how))

    def _register(self, prepare: Callable[[], Part]) -> Component:
        (made,) = registration.register(self.leasing, lambda: [prepare()])
        return made

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
        """Register tensors of safetensors files, read directly into swapd without a second copy.

        `files`: a file, several, a folder, or an index (`model.safetensors.index.json`). Takes the
        tensors whose names begin with `prefix`, and drops that prefix. `rename` maps each name to
        its new one (None: leave the tensor out). Floating-point numbers of 16 bits and more are
        cast to `dtype`.

        With a `module`, on the meta device or not, its parameters become these tensors. Ties are
        kept, and a parameter missing in the files is an error that names it. Buffers are loaded
        too, and stay private. Without a module, `component.tensors` has the tensors by name.
        `policy`, `group`, `mutable` and `segments` are those of `register`.

        Another process that loads the same tensors from the same files shares the bytes, unless
        `mutable`. It first compares all bytes with the files, and shares nothing if one byte
        differs. `progress`: True for a bar (tqdm), or a callable that gets `(done, total)` in
        bytes. By default there is a bar if stderr is a terminal.

        Blocks until all is read. Raises as `register`, and InvalidSource also for files that are
        damaged or do not fit the module; the module is then unchanged.
        """
        with needed("load"):
            from swapd_client.weights.load import planned
        plan = planned(
            files,
            module,
            None,
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            segments=segments,
            gpu=self._joined().processor.index,
            progress=progress,
            share=not mutable,
        )
        return registration.planned(
            self.leasing,
            plan,
            lambda layouts: self._register(
                lambda: self.session.registry.prepare(
                    name, layouts[""], policy=policy, group=group, mutable=mutable
                )
            ),
        )

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

        `parts` maps each part to the names of its tensors, or of modules with them ("blocks.0").
        Tensors that no part names are in the part named "rest".
        """
        with needed("load_family"):
            from swapd_client.weights.load import planned
        plan = planned(
            files,
            module,
            parts,
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            segments=(),
            gpu=self._joined().processor.index,
            progress=progress,
            share=not mutable,
        )
        return registration.planned(
            self.leasing,
            plan,
            lambda layouts: self._register_family(
                name, layouts, resident, policy=policy, group=group, mutable=mutable
            ),
        )

    def resize(self, name: str, size: int | str | None, *, timeout: float | None = None) -> None:
        """Keep `size` bytes ("5.6GiB") of a family on the device; stream the rest.

        Tensors outside all blocks are kept first, then as many blocks as fit, evenly spread, so
        that one more block has room to pass through. None: as many as leave room for two. Takes
        effect at once, except for leased parts. Does not block. Raises: UnknownComponent if `name`
        was not registered in parts; TooLarge if the tensors outside all blocks are "permanent" and
        do not fit; Timeout if the daemon is silent for `timeout` seconds.
        """
        nbytes = nbytes_of(size)
        check("size", nbytes, int | None, A_SIZE)
        self._ask(lambda number: protocol.Resize(number, name, nbytes), timeout, flush=True)
        self.session.registry.resized(name, nbytes)

    def pin(self, name: str, *, timeout: float | None = None) -> None:
        """Keep a component, or the kept parts of a family, on the device once it is loaded.

        The pin lasts until `unpin` by any client, or until the component is unregistered; it
        outlasts this session. Loads nothing: see `prefetch`. Does not block.

        Raises: UnknownComponent; TooLarge if another component, or a waiting request, would not fit
        beside it; Conflict for a member of an alternating group; InUse while it is being evicted;
        Timeout as `resize`.
        """
        self._ask(lambda number: protocol.Pin(number, name), timeout)

    def unpin(self, name: str, *, timeout: float | None = None) -> None:
        """Allow eviction again. Raises: Conflict if the component was registered as "permanent"."""
        self._ask(lambda number: protocol.Pin(number, name, unpin=True), timeout)

    def evict(self, name: str, *, timeout: float | None = None) -> None:
        """Evict an idle component, or the parts of a family, at once.

        Returns when the daemon has decided; mutable contents are saved afterwards. No-op for an
        absent component. A component that another process keeps for its next step (half a second at
        most) counts as leased. Does not block. Raises: UnknownComponent; InUse if it is leased or
        loading, or an acquire waits for it; Conflict if it is pinned or "permanent"; Timeout as
        `resize`.
        """
        self._ask(lambda number: protocol.EvictNow(number, name), timeout, flush=True)

    def forget(self, *names: str, timeout: float | None = None) -> None:
        """Drop host copies that the daemon keeps and no component uses; without names, all.

        `names`: contents, components or families, as in `status().kept`. Their memory is free a
        moment later. Does not block. Raises: UnknownComponent, if nothing of that name is kept;
        then nothing is dropped. Timeout as `resize`.
        """
        self._ask(lambda number: protocol.Forget(number, names), timeout)

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
        overtake: int | None = None,
        progress: Progress | None = None,
        deadline: float | None = None,
    ) -> Lease:
        """Wait until all of `names` are on the device, and hold them there.

        All or none. `timeout` in seconds; a higher `priority` goes first; `await_registration` also
        waits for names that are not registered yet. `overtake`: how many later acquires whose
        components are all loaded may go before this one when it is the first to wait; None: the
        daemon's `--overtake`. `deadline`: the seconds from now within which you want it. It goes
        before others of its priority without a deadline or with a later one, and no other overtakes
        it. When it has passed nothing is refused: that is `timeout`.

        `progress`: called in this thread about once a second while it waits, with the forecast of
        this acquire: `seconds` until the grant, or why they are `unknown`, and what it waits for.
        An exception that it raises ends the wait.

        With `early` it returns as soon as all copies are queued: access this process's components
        only after `lease.wait(segment)`; on a GPU other accesses fault. May be nested, and called
        from any thread.

        Raises: UnknownComponent, TooLarge, Conflict, Deadlock, Timeout, DeviceFailed, SessionEnded;
        then nothing is held.
        """
        how = (names, timeout, priority, await_registration, early, overtake, progress, deadline)
        try:
            return self.leasing.take(*how)
        except DaemonGone:
            return rejoining.repeated(self, lambda: self.leasing.take(*how), timeout)

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Lease:
        """Reserve `size` bytes ("6GiB") of device memory for this process's own allocator.

        For loading a model, capturing graphs, a VAE decode. The daemon evicts idle components to
        make room. The release empties torch's cache, and swapd gets the memory back as soon as the
        driver has it, so drop your tensors before. The size is rounded up to whole chunks.

        Blocks and raises as `acquire`.
        """
        asked = of_workspace(nbytes_of(size), size, timeout, priority)
        return rejoining.repeated(self, lambda: self.leasing.acquire(asked), timeout)

    def acquire_start(self, *, timeout: float | None = None) -> Lease:
        """Wait until no other process starts on this device, and keep others from it until the
        release.

        For an engine that sizes its caches by the free device memory: hold this lease from before
        it reads that size until all is allocated. So each such engine measures itself alone. The
        lease holds no memory, and other acquires are granted as usual. It ends with its process.

        Blocks, for `timeout` seconds at most. Raises: Conflict if this client holds a lease, or is
        already starting; Timeout, which names the starting process; SessionEnded.
        """

        def acquire() -> Lease:
            self.leasing.giving_back.flush_kept()
            return self.leasing.acquire(of_start(timeout))

        return rejoining.repeated(self, acquire, timeout)

    def prefetch(
        self,
        *names: str,
        over: Collection[str] | None = None,
        timeout: float | None = PREFETCH_TIMEOUT_S,
    ) -> None:
        """Load components if there is memory for them and no acquire is waiting.

        Does not wait for the copy, takes no lease, and promises nothing. The daemon evicts idle
        components for it; with `over`, only these components and families, once they are
        idle. Ignores unknown names in `over`.

        A prefetch that found no room within `timeout` seconds is dropped; None: it waits for room
        until the components are acquired. `timeout=0` takes an earlier one back. Any acquire comes
        before it: its copies go first, and the prefetch gives up memory that an acquire needs.
        """
        self._ask(lambda number: prefetch_of(number, names, over, timeout))

    def follows(self, *names: str, after: str) -> None:
        """Say that components are used after another one: a pipeline's next stages.

        While `after` is in use, the daemon loads these, as for `prefetch` without `over`. It stops
        doing so while they mostly leave again unused. Names need not be registered yet, and may be
        of other processes. This replaces what any session said of `after`, and lasts as long as
        this session; without names, nothing follows `after`. It has no effect on an `after` that
        the daemon's `--order` names. Answered at once.
        """
        self._ask(lambda number: protocol.Follows(number, names, after))

    def unregister(self, name: str) -> None:
        """End a registration: the tensors become private memory, with the same addresses and
        values.

        On the host that memory is the component's host copy. It is freed with the last of its
        tensors and views; a bare address does not keep it. `status().private_bytes` counts the
        remaining bytes.

        A family is unregistered part by part: after an error, the parts already done stay
        unregistered.

        On a GPU the private memory is outside the budget, and this blocks for the copy. Raises:
        InUse if the component is leased, OutOfMemory if the GPU has no room (then it stays
        registered), UnknownComponent, SessionEnded; Timeout if the daemon answers nothing for 30
        seconds: then call this again.
        """
        check_name(name)
        for part in self._joined().registry.family(name) or [name]:
            registration.unregister(self.leasing, part)

    def attach(
        self,
        /,
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
        """Register a model's components, and acquire each around the calls that use it.

        `model`: a module, a pipeline that has `components` or a `model`, or a dict of names and
        modules.

        `components`: paths ("thinker", "thinker.visual": the outer one has the weights that are not
        in the inner one), patterns ("visual.*": the outermost matches), or "." for the whole model;
        a usual name ("visual") is found at any depth. Default: the modules that take turns in the
        model, by their names, configs and sizes (`offload/automatic.py`), or the whole model if
        these do not tell. `prefix` goes before the names in the daemon: "flux" makes "flux.vae".

        How they share the device: `policy` (as in `register`; "alternating": at most one of these
        components is on the device), or `settings`, or single settings
        (`cpu_offload_strategy="sequential"`, see `offload/settings.py`). `resident` streams a
        component block by block and keeps that many bytes of it on the device ("5.6GiB"); `blocks`:
        the paths of its blocks, or of lists of them. Both apply to the DiT, or to other components
        worth streaming, or are given by component; see also `resize`.

        `wrap_methods`: methods that use a component's weights, besides the public ones of its own
        class; by component, or for all that have them. `extra_tensors`: names or patterns of
        tensors that are neither parameters nor buffers, and never change. `kinds`: the kind of a
        component ("dit", "encoder", "vae") whose name does not tell it. `stay`: components that are
        never evicted once loaded, under any strategy for the others.

        `trainable`: parameters that stay in private memory, because weights in swapd are read-only:
        names or patterns ("*.lora_*"), True for all that require gradients, False for none.
        Default, in grad mode: those that require gradients, of components in which most parameters
        do not.

        If the daemon ends, the model's next call has this client join the next daemon, as `connect`
        did, and registers all that it has again, at the same addresses. A call that holds weights
        at that moment computes on, or raises a DaemonGone. While no daemon runs, or if it refuses
        the weights, calls raise that error; the weights stay, and each next call tries again.

        The model is attached until `detach` or `close`, or until it is garbage-collected. You need
        not keep the attachment; if you do, it keeps the model alive.

        Blocks for the copies. All of the model is attached, or nothing. Raises: InvalidSource,
        which names the weights that cannot be attached, InvalidArgument, and as `register`.
        """
        with needed("attach"):
            from swapd_client.offload.arguments import Arguments, checked
            from swapd_client.offload.attach import attach

        given = Arguments(
            components=components,
            settings=settings,
            prefix=prefix,
            policy=policy,
            resident=resident,
            blocks=blocks,
            wrap_methods=wrap_methods,
            extra_tensors=extra_tensors,
            kinds=kinds,
            stay=stay,
            trainable=trainable,
        )
        return attach(self, model, checked(given, flags))

    def forecast(self, *names: str, timeout: float | None = None) -> protocol.Forecast:
        """Forecast `acquire(*names)` if called now: bytes, victims, holders to wait for, seconds.

        Changes nothing, and promises nothing: other requests may come first. Raises the errors that
        the acquire would raise at once; Timeout if the daemon is silent for `timeout` seconds.
        """
        reply = self._ask(lambda number: protocol.ForecastRequest(number, names), timeout)
        assert isinstance(reply, protocol.Forecast)
        return reply

    def cheapest(
        self, names: Iterable[str], *, timeout: float | None = None
    ) -> list[protocol.Forecast]:
        """Return the forecasts of components or families, each acquired alone, the cheapest first.

        For a program with a queue of its own, which serves first what is loaded. Those that wait
        for no holder come first, then those with the shortest copies. One request for each name;
        raises as `forecast`.
        """
        return cheapest_first(
            self.forecast(name, timeout=timeout) for name in each_once("names", names)
        )

    def update(self, name: str, values: Mapping[str, Any]) -> None:
        """Give a clean component, or parts of a family, new values: a state dict, or part of one.

        `values` are tensors (or buffers, if buffers were registered) by registered name, with the
        same shapes and dtypes; tensors not named keep their values. The new values are written to a
        second host copy, which replaces the old one in one step. Current holders of the component
        keep the old bytes until they release. Every later acquire waits for the new bytes, of all
        parts of a family, however the leases of other threads and processes overlap. There are two
        exceptions: a thread that already holds the component takes the old bytes again until it has
        released all of them, and so do threads of one process that would otherwise deadlock. So do
        not wait, under a lease, for another thread to acquire the same component. Components that
        `attach` streams change between two calls: this waits for running calls.

        Values that are themselves in a component are read under its lease. Blocks for the copies,
        and needs host memory for the second host copy meanwhile. Raises: InvalidSource, which names
        the first value that does not fit, or that is not leased; InvalidArgument for a mutable
        component (write to it under a lease instead); OutOfMemory; InUse if another thread updates
        it; UnknownComponent, SessionEnded. After any of them nothing has changed.
        """
        check_name(name)
        waits = [one.between_passes(name) for one in list(self.attachments) if one.streams(name)]
        # one for all models: an interrupt in an ExitStack would leave what it has entered
        with waits[0] if waits else nullcontext():
            self._update_together({name: values})

    def _update_together(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """As `update`, for several components or families, which all change in one step.

        A lease of several of them has the new values of all, or the old ones. A pass that holds a
        family part by part may have both.
        """
        from swapd_client.weights import update

        try:
            update.together(self.session, self.leasing.call, values)
        except SessionEnded as exc:
            self._join_next(exc)
            update.together(self.session, self.leasing.call, values)
        with suppress(SessionEnded):  # the update has taken place
            self.leasing.giving_back.flush_kept()

    def status(self, *, timeout: float | None = None) -> protocol.Status:
        """Report the resident components, their holders, and the bytes moved.

        Raises: Timeout if the daemon is silent for `timeout` seconds.
        """
        reply = self._ask(protocol.StatusRequest, timeout)
        assert isinstance(reply, protocol.Status)
        return reply

    def close(self, *, keep: bool = True) -> None:
        """End the session. Registered tensors become private memory; leases are over.

        Without `keep` nothing is copied; do not access these tensors any more. On a GPU it waits
        for the work under released leases. When it returns, the daemon knows that this process can
        no longer write to its memory. A daemon that answers nothing for 30 seconds is treated as
        one that is gone. If the GPU has no room for private copies, a warning names the components
        whose tensors are lost.

        A signal handler may call it. If it interrupts a call of this client that must finish first,
        a thread closes the client, and this returns at once.
        """
        if not self.session.forked and self.leasing.is_interrupted():
            self._closer = threading.Thread(target=self._close_here, kwargs={"keep": keep})
            self._closer.start()
            return
        self._close_here(keep=keep)
        closer = self._closer
        if closer is not None and closer.is_alive() and not self.leasing.factory.is_waiting():
            closer.join()

    def _close_here(self, *, keep: bool) -> None:
        rejoining.stay(self)
        _close(self.leasing, keep=keep)
        restore_models(self)
        self.dropped.detach()  # last: until then, collecting the client closes it

    # --- the next daemon -------------------------------------------------------------------

    def _joined(self) -> Session:
        """Return the session, with the next daemon if the last is gone."""
        rejoining.repeated(self, lambda: self.session.check())
        return self.session

    def _ask(
        self,
        request: Callable[[int], protocol.AnyRequest],
        timeout: float | None = None,
        *,
        flush: bool = False,
    ) -> protocol.AnyReply:
        """Return the reply to a request; if the daemon dies, ask the next one.

        `flush`: first end kept leases, which would count as use.
        """

        def ask() -> protocol.AnyReply:
            self.session.check()  # first: after a fork the session's lock may be held for good
            if flush:
                self.leasing.giving_back.flush_kept()
            return self.leasing.call(request(self.session.next_id()), timeout)

        return rejoining.repeated(self, ask, timeout)

    def _daemon_gone(self, error: SessionEnded) -> bool:
        """After a call of an attached model found the session ended: join the next daemon.

        Returns False if the weights are private memory, so that the call needs no lease. Blocks and
        raises as `_join_next`.
        """
        if self.when_gone is not None:
            self.when_gone(error)
            return False
        self._join_next(error)
        return True

    def _join_next(self, error: SessionEnded, until: float | None = None) -> None:
        """Join the next daemon at the same endpoint.

        All that the client has is registered again: names, policies, families and their sizes,
        addresses, and the last bytes of mutable components; not pins, prefetches and `follows`.
        First waits until no lease is in use and no other thread finishes a change, and for a
        daemon, until this time (monotonic; by default as `connect(reconnect=)` says). Then blocks
        for the copies of bytes that are in no host copy which the daemon can take over; no memory
        of the GPU is needed.

        Raises: `error` while a lease is in use or a component is being changed, and if only
        attached models are to join, and there is none; otherwise as `connect` and `register`: then
        the weights are intact, and the next call tries again. ClientClosed if it was closed.
        """
        plain = self.reconnect_s and isinstance(error, DaemonGone)
        if self.when_gone is not None or not (plain or self.attachments):
            raise error
        rejoining.join_next(self, error, until or rejoining.until_of(self))

    def _leasing_of(self, session: Session) -> Leasing:
        factory = session.channels or ChannelFactory(session)
        return Leasing(session, factory, tracing_of(session, self._tracing))

    def _move_to(self, leasing: Leasing) -> None:
        before, self.dropped = self.dropped, self._close_when_collected(leasing)
        self.leasing = leasing
        before.detach()

    def _close_when_collected(self, leasing: Leasing) -> "weakref.finalize[..., object]":
        close = partial(_close, leasing, keep=True)
        return close_when_collected(self, leasing.session, leasing.in_use, close)


def _close(leasing: Leasing, *, keep: bool) -> None:
    registration.end(leasing, keep=keep)
    leasing.close()


def restore_models(client: Client) -> None:
    """Remove the hooks of attached models, after closing."""
    for attachment in list(client.attachments):
        attachment.let_go()
