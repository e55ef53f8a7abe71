"""A session without a daemon, for tests and comparisons: components are this process's own memory.

A component moves into private memory when it is registered (on a GPU: memory of torch) and stays
there, so an acquire is granted at once. Unknown names, taken names and components in use are
refused as by a daemon. An acquire with `await_registration` takes an unknown name for another
process's component, and is granted.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from swapd.shared import protocol, vm
from swapd.shared.board import BOARD_BYTES
from swapd.shared.config import HOST_CHUNK
from swapd.shared.fds import OwnedFd
from swapd.shared.text import reason
from swapd.shared.units import size
from swapd_client.errors import DeviceFailed
from swapd_client.memory.layout import RemoteBytes
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.channel import Channel, ChannelFactory
from swapd_client.session.lifeline import Lifeline
from swapd_client.session.loop_channel import AsyncChannel
from swapd_client.session.processor import Processor
from swapd_client.session.registry import Registry
from swapd_client.session.session import Session, alive
from swapd_client.session.wire import encoded

_NOTE = "swapd is disabled ($SWAPD_DISABLE, or connect(disabled=True)): nothing moves"


class _NoLine(Lifeline):
    folder: Any = None
    # alive, so that `close` does not treat the private memory as that of a lost daemon
    _daemon_pid = os.getpid()

    def __init__(self, *_: object) -> None: ...

    def shake_hands(self, label: str) -> tuple[protocol.Welcome, OwnedFd]:
        board = OwnedFd(os.memfd_create("swapd-board"))
        os.ftruncate(board.fileno(), BOARD_BYTES)
        version = protocol.VERSION
        return protocol.Welcome(version, 0, b"", "", label, HOST_CHUNK, 0, strict=False), board

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    listen = send = ring = let_go = close = forget = _nothing


class _OnGpu(Place):
    """Memory of torch that lasts as long as objects in it. Other methods do nothing."""

    shown = True

    def __init__(self, nbytes: int, buffer: Any) -> None:
        super().__init__(nbytes, taken_over=False)
        self.address, self._buffer = buffer.data_ptr(), buffer

    def used_by(self, things: Iterable[object]) -> None:
        for thing in things:
            weakref.finalize(thing, id, self._buffer).atexit = False  # keeps the buffer until then

    def edit(self, write: Callable[[int], object]) -> None:
        """Let `write` change a copy in host memory, and copy that back."""
        copy = self._buffer.to("cpu", copy=True)
        write(copy.data_ptr())
        self._buffer.copy_(copy)


class _Gpu(Processor):
    index = 0

    def __init__(self, welcome: protocol.Welcome, *_: object) -> None:
        import torch

        from swapd_client.memory import dlpack

        self._torch, self._dlpack = torch, dlpack
        self.index = int(welcome.device.strip("cuda:") or 0)
        self._target = dlpack.gpu(self.index)

    def reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        span, device = vm.round_up(max(nbytes, 1)), self._target.device
        try:
            with self._torch.inference_mode(mode=False):  # or `edit` could not write outside of it
                buffer = self._torch.zeros(span, dtype=self._torch.uint8, device=device)
        except (RuntimeError, AssertionError) as exc:  # of torch
            why = f"{device} has no {size(span)} for torch: {exc}"
            raise DeviceFailed(f'{why}. Connect to another device, or to "host"') from exc
        return _OnGpu(nbytes, buffer)

    def fetch(self, spans: Sequence[RemoteBytes]) -> None:
        self._torch.cuda.synchronize(self.index)
        for target, source, nbytes in spans:
            there = self._dlpack.bytes_at(source, nbytes, self._target)
            self._dlpack.bytes_at(target, nbytes, self._dlpack.HOST).copy_(there)


class _Registry(Registry):
    def bind(self, part: Part) -> None:
        assert part.master is not None
        master = part.master if part.layout.filled or not part.scratch else None
        if not isinstance(part.where, _OnGpu):
            part.where.make_private(master, keep_shown=False)
        elif master is not None:
            with open(f"/proc/self/fd/{master.fileno()}", "rb") as file:  # from its start
                part.where.edit(lambda address: file.readinto(vm.view(address, part.nbytes)))
            os.ftruncate(master.fileno(), 0)
        super().bind(part)

    def map_master(self, part: Part) -> int | None:
        return None  # its bytes are private memory


class Disabled(Session):
    """A session without a daemon. Thread-safe."""

    is_disabled = True
    _line, _gpu, _registry = _NoLine, _Gpu, _Registry

    def __init__(self, device: str) -> None:
        super().__init__(Path("no daemon"), device)
        self.channels = _Channels(self)
        self._board.set(0, protocol.SEGMENTS_MAX)  # all segments of all components are there

    def close(self, *, keep: bool = True) -> None:
        super().close()

    def edit(self, part: Part, write: Callable[[int], None]) -> None:
        if isinstance(part.where, _OnGpu):
            part.where.edit(write)
        else:
            with part.where.lock:  # else its last tensor may go now, and the memory with it
                if not part.where.over:
                    write(part.address)

    def reply(self, request: protocol.AnyRequest) -> protocol.AnyReply:
        """Return a daemon's reply. Does not block. Raises: the error that ended the session."""
        self.check()
        if problem := _malformed(request) or self._problem_with(request):
            return protocol.Refused(request.id, *problem)
        match request:
            case protocol.Register(name=name, nbytes=nbytes):
                file = OwnedFd(os.memfd_create("swapd"))
                os.ftruncate(file.fileno(), nbytes)
                self.masters.add(protocol.Master(name, nbytes, request=request.id), file)
            case protocol.Acquire():
                return self._granted(request)
            case protocol.AcquireWorkspace() | protocol.AcquireStart():
                return protocol.Granted(request.id, ())
            case protocol.ForecastRequest(names=names):
                return protocol.Forecast(request.id, names, 0, 0, 0, (), (), 0.0, None)
            case protocol.StatusRequest():
                return self._status(request.id)
        return protocol.Done(request.id)

    def _problem_with(self, request: protocol.AnyRequest) -> tuple[protocol.Code, str] | None:
        families = {one.part_of for one in _all()} - {""}
        alone = {one.name for one in _all()}
        known = alone | families
        match request:
            case protocol.Register(name=name, part_of=family) if name in known or family in alone:
                taken = name if name in known else family
                return "duplicate_name", f"{taken!r} is registered already: choose another name"
            case protocol.Resize(name=name) if name not in families:
                return "unknown_component", f"{name!r} is no component registered in parts"
            case protocol.Unregister(name=name) | protocol.EvictNow(name=name) if self._uses(name):
                return "in_use", f"{name!r} is leased; release it first"
            case protocol.AcquireStart() if len(self.leases):
                return "conflict", "what starts holds no lease, and starts once: release it first"
            case protocol.Acquire(names=names) if rivals := _rivals(names):
                return "conflict", f"{', '.join(rivals)} exclude each other: acquire them in turn"
        return _unknown(request, known)

    def _uses(self, name: str) -> int:
        names = {one.name for one in _all() if one.is_of(name)}
        return sum(record.has_any(names) for one in _sessions() for record in one.leases)

    def _granted(self, request: protocol.Acquire) -> protocol.Granted:
        asked = {one.name: one for one in _all() if {one.name, one.part_of} & set(request.names)}
        others = [name for name in request.names if name not in asked]
        # the generation of what never moves is 0, and that of the contents of scratch is 1
        here = tuple(
            protocol.Placement(name, 0, (), contents=int(one.scratch != ""))
            for name, one in asked.items()
            if name in self.components
        )
        return protocol.Granted(request.id, here, names=(*asked, *others))

    def _status(self, number: int) -> protocol.Status:
        used = sum(one.nbytes for one in _all())
        said = ("", self.welcome.device, "", "", "disabled", 0.0, HOST_CHUNK, 0, used, used)
        shown = tuple(map(self._shown, _all()))
        return protocol.Status(number, *said, *(0, 0, 0, 0, 0, 0, 0, 0), shown, (), notes=(_NOTE,))

    def _shown(self, one: Part) -> protocol.ComponentStatus:
        uses, kind = self._uses(one.name), "scratch" if one.scratch else "component"
        said: Any = (one.name, 0, one.nbytes, "resident", one.policy, one.group, one.mutable, uses)
        held: Any = (("this process",) * bool(uses), None, 0, 0, 0, None, one.part_of, None, kind)
        return protocol.ComponentStatus(*said, *held)


def _sessions() -> list[Disabled]:
    """Return those of all disabled clients of this process, as if they had one daemon."""
    here = [one for ref in alive.keyrefs() if isinstance(one := ref(), Disabled)]
    return [one for one in here if one.life.usable]


def _all() -> list[Part]:
    return [part for one in _sessions() for part in list(one.components.values())]


def _rivals(names: Iterable[str]) -> list[str]:
    """Return components, or families, of an alternating group of which several are named."""
    groups: dict[str, dict[str, None]] = {}
    for one in _all():
        if one.group is not None and any(map(one.is_of, names)):
            groups.setdefault(one.group, {})[one.part_of or one.name] = None
    return next((list(named) for named in groups.values() if len(named) > 1), [])


def _malformed(request: protocol.AnyRequest) -> tuple[protocol.Code, str] | None:
    """Return what a daemon finds wrong with a request that came to it. Raises as `encoded`."""
    from swapd.core import requests  # pure, but slow to import with all of the core

    data = encoded(request)
    try:
        problem = requests.problem_with(protocol.decode_request(data))
    except protocol.NOT_A_MESSAGE as exc:
        problem = f"not a request of protocol {protocol.VERSION}: {reason(exc)}"
    return ("bad_request", problem) if problem else None


def _unknown(request: protocol.AnyRequest, known: set[str]) -> tuple[protocol.Code, str] | None:
    names = getattr(request, "names", (getattr(request, "name", ""),))
    match request:
        case protocol.Forget(names=(name, *_)):
            return "unknown_component", f"no host copy of {name!r} is kept"
        case (
            protocol.Acquire(await_registration=False)
            | protocol.Prefetch(over=None)
            | protocol.ForecastRequest()
            | protocol.Pin()
            | protocol.EvictNow()
        ) if missing := [name for name in names if name not in known]:
            return "unknown_component", (
                f"nobody has registered {missing[0]!r} in this process, and swapd is disabled; "
                f"registered: {', '.join(sorted(known)) or 'nothing'}. Use await_registration=True "
                "if it is another process's: without swapd that waits for nothing"
            )
    return None


class _Channels(ChannelFactory, Channel):
    _own = threading.local()  # stays empty: no call waits

    def __init__(self, session: Disabled) -> None:
        self.session: Disabled = session
        self._asked = {}

    def channel(self) -> Channel:
        return self

    def close(self) -> None:
        self.session.life.ended.close()

    def call(self, request: protocol.AnyRequest, *_: Any, **__: Any) -> protocol.AnyReply:
        return self.session.reply(request)

    def send(self, request: protocol.AnyRequest) -> None:
        pass  # the end of a lease, or a hint

    def ask(self, request: protocol.AnyRequest) -> None:
        self._asked[request.id] = self.session.reply(request)

    def collect(self, request: int, within_s: float) -> protocol.AnyReply | None:
        return self._asked.pop(request)

    def unheard(self, beside: Channel) -> list[protocol.AnyRequest]:
        return []


class LoopChannel(AsyncChannel):
    def __init__(self, factory: ChannelFactory) -> None:
        self._disabled: Any = factory.session

    def send(self, request: protocol.AnyRequest) -> None:
        pass  # the end of a lease

    async def call(self, request: protocol.AnyRequest, *_: Any, **__: Any) -> protocol.AnyReply:
        return self._disabled.reply(request)  # type: ignore[no-any-return]

    def close_socket(self) -> None:
        pass
