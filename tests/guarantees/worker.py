"""A worker process that runs commands: `python worker.py`.

One JSON command a line on stdin, `{"id", "lane", "do", "args", "options"}`; one answer for each on
stdout, `{"id", "ok"}` or `{"id", "error", "message"}`. Commands of one lane run in order, in a
thread of their own; lanes run in parallel. The driving process (see `harness.Worker`) may end it at
any time, by any signal.
"""

import ctypes
import gc
import json
import os
import queue
import random
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from zlib import crc32

from swapd.shared import vm
from swapd.shared.protocol import LIFELINE_MAX_BYTES, Goodbye, decode_from_daemon
from swapd.shared.runtime_dir import LIFELINE
from swapd_client import Client, Component, Lease, SwapdError, Timeout, connect, rejoining
from swapd_client.errors import SessionEnded
from swapd_client.memory.part import Part

BLOCK_BYTES = 64 << 10

#: A forked child ends itself after so many seconds at the latest.
CHILD_S = 100


def pattern(seed: int, nbytes: int) -> bytearray:
    """Bytes that no other seed gives, and no two parts of which are equal."""
    block = random.Random(seed).randbytes(BLOCK_BYTES - 8)
    count = -(-nbytes // BLOCK_BYTES)
    data = bytearray().join(part for i in range(count) for part in (i.to_bytes(8, "little"), block))
    del data[nbytes:]
    return data


def digest(data: memoryview | bytearray) -> str:
    """It finds every burst of up to four wrong bytes, and others but for one in four billion."""
    return f"{crc32(data):08x}"


class Worker:
    """One client, its components and leases by name. A method for each command."""

    def __init__(self) -> None:
        self._endpoint = self._label = ""
        self._reconnect = 0.0
        self._lanes: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._out = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._parts: dict[str, Component] = {}
        #: Made once, at registration: their addresses never change.
        self._views: dict[str, memoryview] = {}
        self._tensors: dict[str, Any] = {}
        self._client: Client | None = None
        self._half: Any = None
        self._may_close = threading.Event()
        self._mappings: list[int] = []

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(self._endpoint, label=self._label, reconnect=self._reconnect)
        return self._client

    # --- commands ------------------------------------------------------------------------

    def meet(self, endpoint: str, label: str, reconnect: float = 0) -> None:
        """Set the folder to connect to, when needed, the label, and the wait for a next daemon."""
        self._endpoint, self._label, self._reconnect = endpoint, label, reconnect

    def become(self, user: int) -> None:
        """Become another user."""
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    def allow_descriptors(self, more: int) -> None:
        """Limit this process to so many more descriptors than it has."""
        now = len(os.listdir("/proc/self/fd")) - 1  # without that of the list
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + more, hard))

    def fill_mappings(self) -> None:
        """Make as many mappings as the system allows this process."""
        with suppress(OSError):
            while True:  # the kernel would make one of neighbours that are alike
                self._mappings.append(vm.map_anonymous(vm.PAGE_BYTES))
                vm.protect_none(self._mappings[-1], vm.PAGE_BYTES)
                self._mappings.append(vm.map_anonymous(vm.PAGE_BYTES))

    def free_mappings(self) -> None:
        while self._mappings:
            vm.free(self._mappings.pop(), vm.PAGE_BYTES)

    def ping(self) -> int:
        """The session's number; connects if need be."""
        return self.client.session.welcome.session

    def knock(self) -> str:
        """Connect to the lifeline without a client, and return the daemon's first message."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lifeline:
            lifeline.settimeout(CHILD_S)
            lifeline.connect(f"{self._endpoint}/{LIFELINE}")
            heard = decode_from_daemon(lifeline.recv(LIFELINE_MAX_BYTES))
            assert isinstance(heard, Goodbye)
            return heard.message

    def register(self, name: str, nbytes: int, *, seed: int = 0, **options: Any) -> str:
        """Register `nbytes` bytes made from `seed`, or from the name; return their digest."""
        data = pattern(seed or crc32(name.encode()), nbytes)
        expected = digest(data)
        self._register(name, data, options)
        return expected

    def register_again(self, name: str, **options: Any) -> None:
        """Register an earlier component again from its private memory."""
        self._register(name, self._views[name], options)

    def _register(self, name: str, data: bytearray | memoryview, options: dict[str, Any]) -> None:
        part = self._parts[name] = self.client.register(name, {"data": data}, **options)
        self._views[name] = part.view("data")

    def register_scratch(self, name: str, nbytes: int, **options: Any) -> None:
        self._parts[name] = self.client.register_scratch(name, nbytes, **options)
        self._show(name)

    def _show(self, name: str) -> None:
        part = self._parts[name]
        self._views[name] = vm.view(part.address, part.nbytes)

    def fresh(self, lease: str, name: str = "") -> bool:
        """Whether the contents of scratch are new, by its lease."""
        return self._leases[lease].fresh(name or lease)

    def used(self, name: str, ranges: list[tuple[int, int]]) -> None:
        self._parts[name].used(ranges)

    def lost(self, name: str) -> bool:
        return self._parts[name].lost

    def register_in_segments(self, name: str, nbytes: int, count: int, **options: Any) -> list[str]:
        """Register `count` buffers of `nbytes`, a segment each; return their digests."""
        parts = {str(i): pattern(i, nbytes) for i in range(count)}
        segments = [[key] for key in parts]
        self._parts[name] = self.client.register(name, parts, segments=segments, **options)
        return [digest(data) for data in parts.values()]

    def arrive(self, lease: str, segment: int) -> str:
        """Wait for a segment; return its digest."""
        self._leases[lease].wait(segment)
        return digest(self._parts[lease].view(str(segment)))

    def see(self, name: str, count: int) -> list[str]:
        """The digests of its segments, lease or not."""
        return [digest(self._parts[name].view(str(i))) for i in range(count)]

    def look_at(self, name: str, key: str | int) -> str:
        """The digest of one of its buffers, which must be private."""
        return digest(self._parts[name].view(str(key)))

    def register_tensor(self, name: str, nbytes: int, *, seed: int = 0, **options: Any) -> str:
        """The same with a torch tensor, named "data"."""
        import torch

        data = pattern(seed, nbytes)
        expected = digest(data)
        tensor = torch.frombuffer(data, dtype=torch.uint8).clone()
        self._parts[name] = self.client.register(name, {"data": tensor}, **options)
        self._tensors[name] = tensor
        return expected

    def register_tensor_again(self, name: str, **options: Any) -> int:
        """Register it again, with another daemon; return its `data_ptr`."""
        tensor = self._tensors[name]
        self._parts[name] = self.client.register(name, {"data": tensor}, **options)
        address: int = tensor.data_ptr()
        return address

    def tensor(self, name: str) -> tuple[int, str]:
        """Its `data_ptr`, and the digest of its bytes."""
        tensor = self._tensors[name]
        return tensor.data_ptr(), digest(memoryview(tensor.numpy()))

    def tensor_address(self, name: str) -> int:
        address: int = self._tensors[name].data_ptr()
        return address

    def lose_tensor(self, name: str) -> None:
        """Drop the tensor, and keep only its name."""
        self._tensors.pop(name, None)
        self._parts.pop(name, None)
        gc.collect()

    def keep_half_of_a_tensor(self, name: str, nbytes: int) -> list[str]:
        """Register a tensor, unregister it, and keep a view of half of it; its digests before and
        now.
        """
        self.register_tensor(name, nbytes, seed=1)
        self.unregister(name)
        half = self._half = self._tensors[name][nbytes // 2 :].numpy()
        before = digest(memoryview(half))
        self.lose_tensor(name)
        return [before, digest(memoryview(half))]

    def lose_half(self) -> str:
        last = digest(memoryview(self._half))
        self._half = None
        return last

    def use_without_looking(self, name: str) -> bool:
        with self.client.acquire(name):
            return True

    def register_and_unregister(
        self, name: str, nbytes: int, times: int, *, tensors: bool, **options: Any
    ) -> None:
        """Register and unregister again and again, and read all bytes before each end."""
        for i in range(times):
            if tensors:
                expected = self.register_tensor(name, nbytes, seed=i, **options)
            else:
                expected = self.register(name, nbytes, seed=i, **options)
            self.use_without_looking(name)
            self.client.unregister(name)
            seen = self.tensor(name)[1] if tensors else self.look(name)[1]
            assert seen == expected
            self._views.pop(name, None)
            self.lose_tensor(name)

    def memory(self) -> dict[str, int]:
        """The kernel's figures of this process, in bytes: all of it, and host copies mapped."""
        with open("/proc/self/smaps_rollup") as rollup:
            lines = [line.split() for line in rollup.readlines()[1:]]
        said = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines}
        said["Pss"] -= said["Pss_File"]  # without libraries, whose share varies
        with open("/proc/self/maps") as maps:
            spans = [line.split(maxsplit=5) for line in maps]
        said["masters"] = said["mapped"] = 0
        for span, *_, last in spans:
            start, end = (int(text, 16) for text in span.split("-"))
            said["mapped"] += end - start
            said["masters"] += (end - start) * ("memfd:swapd-host-copy" in last)
        return said

    def fork_and_lose_tensor(self, name: str) -> int:
        """In a child, map memory at a tensor's address, and drop the tensor; its exit status."""
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_S)
            address, nbytes = self._tensors[name].data_ptr(), self._tensors[name].nbytes
            vm.map_anonymous(nbytes, at=address)
            ctypes.c_ubyte.from_address(address).value = 7
            self.lose_tensor(name)
            os._exit(0 if ctypes.c_ubyte.from_address(address).value == 7 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def stall_in_register(self, name: str, nbytes: int) -> None:
        """Begin to register; report when half of the host copy is filled, and stay there."""
        session = self.client.session

        def half(part: Part) -> None:
            self._say({"event": "half filled"})
            threading.Event().wait()

        session.registry.fill = half  # type: ignore[method-assign]
        self.client.register(name, {"data": pattern(0, nbytes)})

    def acquire(self, *names: str, lease: str = "", **options: Any) -> dict[str, Any]:
        """Acquire, and keep the lease under the name `lease`, else under the components' names."""
        held = self.client.acquire(*names, **options)
        self._leases[lease or "+".join(names)] = held
        return {"loaded": held.loaded, "waited_s": held.waited_s}

    def acquire_workspace(self, nbytes: int, *, lease: str = "workspace", **options: Any) -> float:
        """Acquire a workspace, and keep the lease under the name `lease`."""
        held = self._leases[lease] = self.client.acquire_workspace(nbytes, **options)
        return held.waited_s

    def give_up_until_granted(self, name: str) -> int:
        """Acquire with a minimal timeout until it is granted; return the number of failures."""
        failed = 0
        while True:
            try:
                self.client.acquire(name, timeout=0.001).release()
            except Timeout:
                failed += 1
            else:
                return failed

    def release(self, lease: str) -> None:
        self._leases.pop(lease).release()
        self._settle()

    def swap(self, name: str, times: int) -> None:
        """Acquire and release, many times."""
        for _ in range(times):
            self.client.acquire(name).release()

    def update(self, name: str, seed: int) -> None:
        """Give a component that was registered with `register` the bytes of another seed."""
        self.client.update(name, {"data": pattern(seed, self._parts[name].nbytes)})

    def overlap_and_update(self, name: str, seed: int, *, threads: int, uses: int) -> list[str]:
        """Update while threads acquire, look, and release; return the digests of `uses` acquires of
        each thread after the update.
        """
        all_at_it = threading.Barrier(threads + 1)
        updated = threading.Event()
        seen: list[str] = []

        def work() -> None:
            self._look_under_lease(name)
            all_at_it.wait()
            while not updated.is_set():
                self._look_under_lease(name)
            seen.extend(self._look_under_lease(name) for _ in range(uses))

        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        all_at_it.wait()
        self.update(name, seed)
        updated.set()
        for thread in started:
            thread.join()
        return seen

    def _look_under_lease(self, name: str) -> str:
        with self.client.acquire(name):
            return self.look(name)[1]

    def use(self, name: str) -> tuple[int, str]:
        """Acquire, look at it, release."""
        with self.client.acquire(name):
            seen = self.look(name)
        self._settle()
        return seen

    def address(self, name: str) -> int:
        return self._parts[name].address

    def look(self, name: str) -> tuple[int, str]:
        """The address of the bytes, and their digest; to be called under a lease only."""
        return self._parts[name].address, digest(self._views[name])

    def _settle(self) -> None:
        """Wait until the daemon has read all earlier messages, if it still runs."""
        with suppress(SwapdError):
            self.client.status()

    def write(self, name: str, seed: int) -> str:
        """Overwrite all bytes with those of `seed`, even if that faults; return the digest."""
        part = self._parts[name]
        data = pattern(seed, part.nbytes)
        ctypes.memmove(part.address, bytes(data), part.nbytes)
        return digest(data)

    def peek(self, name: str) -> int:
        """Read one byte, lease or not."""
        return ctypes.c_ubyte.from_address(self._parts[name].address).value

    def work_until_wanted(self, lease: str) -> int:
        """Do steps on one lease until another session wants its memory; then give way."""
        held = self._leases[lease]
        steps = 0
        while not held.wanted:
            self.look(held.names[0])
            steps += 1
        self.release(lease)
        return steps

    def keep_the_gil(self, seconds: float) -> None:
        """Let no other thread run for so long, like a collection of a large heap."""
        self._say({"event": "keeps the GIL"})
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def prefetch(self, *names: str) -> None:
        self.client.prefetch(*names)

    def unregister(self, name: str) -> None:
        self.client.unregister(name)

    def disconnect(self, *, keep: bool = True) -> None:
        """Close the client; the next command that needs one connects anew."""
        self.client.close(keep=keep)
        self._client = None
        self._leases.clear()

    def join_next(self) -> None:
        """Have the client join the next daemon in place of the last one, as for attached models."""
        life = self.client.session.life
        life.await_end()
        self._leases.clear()
        assert isinstance(life.error, SessionEnded)
        rejoining.join_next(self.client, life.error, rejoining.until_of(self.client))

    def drop_client(self) -> None:
        """Drop the client without closing it; the next command that needs one connects anew."""
        self._client = None
        self._leases.clear()
        gc.collect()

    def drop_client_that_closes_late(self) -> None:
        """As `drop_client`; the client's close waits for `let_client_close`."""
        giving_back = self.client.leasing.giving_back
        keep_no_more = giving_back.keep_no_more

        def late() -> None:
            self._may_close.wait(CHILD_S)
            keep_no_more()

        cast("Any", giving_back).keep_no_more = late
        del giving_back
        self.drop_client()

    def let_client_close(self) -> None:
        self._may_close.set()

    def token(self) -> str:
        return self.client.session.welcome.token.hex()

    def let_go(self, token: str) -> None:
        """Say that this process has let go of the memory of the session with that token."""
        self.client.session.lifeline.let_go(bytes.fromhex(token))

    def error(self) -> str:
        """The error that ended the session; "" if it runs."""
        error = self.client.session.error
        return f"{type(error).__name__}: {error}" if error else ""

    def await_end(self) -> str:
        """Wait until the session has ended; return the error that ended it."""
        select.select([self.client.session.life.ended.fileno()], [], [])
        return self.error()

    def fork(self, name: str) -> dict[str, Any]:
        """Fork; return the child's pid, and the results of its use of the client.

        The child lives on, with every descriptor except the three standard ones.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_S)
            os.write(writing, json.dumps(self._try_everything(name)).encode())
            os.close(writing)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nowhere, fd)
            while True:
                signal.pause()
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return {"child": child, "errors": json.loads(pipe.read())}

    def fork_and_close(self) -> int:
        """Fork a child that closes the client and ends; return its exit status."""
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_S)
            try:
                self.client.close()
            except SwapdError as exc:
                sys.stderr.write(f"{exc}\n")
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _try_everything(self, name: str) -> dict[str, str]:
        errors = {}
        uses: dict[str, Callable[[], object]] = {
            "acquire": lambda: self.client.acquire(name),
            "release": lambda: self._leases[name].release(),
            "status": lambda: self.client.status(),
            "register": lambda: self.client.register("child", {"data": bytearray(8)}),
            "unregister": lambda: self.client.unregister(name),
        }
        for verb, use in uses.items():
            try:
                use()
            except SwapdError as exc:
                errors[verb] = type(exc).__name__
        return errors

    # --- the loop ------------------------------------------------------------------------

    def serve(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            lane = command["lane"]
            if lane not in self._lanes:
                self._lanes[lane] = queue.SimpleQueue()
                threading.Thread(target=self._run, args=(lane,), name=lane, daemon=True).start()
            self._lanes[lane].put(command)
        os._exit(0)  # the driving process has gone

    def _run(self, lane: str) -> None:
        while True:
            command = self._lanes[lane].get()
            try:
                method = getattr(self, command["do"])
                result = method(*command["args"], **command["options"])
                self._say({"id": command["id"], "ok": result})
            except Exception as exc:  # noqa: BLE001 - the driver judges
                error = type(exc).__name__
                self._say({"id": command["id"], "error": error, "message": str(exc)})

    def _say(self, message: dict[str, Any]) -> None:
        with self._out:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    Worker().serve()
