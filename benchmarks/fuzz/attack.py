"""Sends frames to one socket of a daemon: `attack.py FOLDER rpc|lifeline FRAMES SEED NAME...`.

Prints at the end, as a line of JSON, the number of frames that the daemon has handled, and of
sessions. Fails if the daemon does not answer a valid request among invalid ones within PATIENCE_S.
"""

import os
import random
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import zmq

from benchmarks.fuzz.frames import Frames
from swapd.shared import protocol, runtime_dir
from swapd.shared.fds import OwnedFd, recv_packet, send_packet

PATIENCE_S = 60.0
#: Frames of one session, so that accidental grants are soon given back.
ON_RPC = 400
ON_LIFELINE = 12


class Sent(msgspec.Struct):
    frames: int = 0
    sessions: int = 0
    #: Sessions that the daemon ended before their last frame.
    ended: int = 0
    answers: int = 0


class NoAnswer(Exception):
    """The daemon is silent."""


@contextmanager
def lifeline(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(PATIENCE_S)
        line.connect(str(folder / runtime_dir.LIFELINE))
        yield line


def welcomed(line: socket.socket) -> protocol.Welcome:
    send_packet(line, protocol.encode(protocol.Hello(protocol.VERSION, "fuzz")))
    data, fds = recv_packet(line, protocol.LIFELINE_MAX_BYTES)
    for fd in fds:
        fd.close()
    welcome = protocol.decode_from_daemon(data)
    assert isinstance(welcome, protocol.Welcome), welcome
    return welcome


def drained(line: socket.socket) -> bool:
    """Read all pending messages; return whether the daemon has ended the connection."""
    line.settimeout(0)
    try:
        while True:
            data, fds = recv_packet(line, protocol.LIFELINE_MAX_BYTES)
            for fd in fds:
                fd.close()
            if not data:
                return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        line.settimeout(PATIENCE_S)


# --- rpc ---------------------------------------------------------------------------------


def attack_rpc(folder: Path, frames: Frames, count: int, rng: random.Random) -> Sent:
    sent = Sent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while sent.frames < count:
        with lifeline(folder) as line:
            _one_session(line, context, frames, rng, sent)
    context.destroy(linger=0)
    return sent


def _one_session(
    line: socket.socket,
    context: "zmq.Context[zmq.Socket[bytes]]",
    frames: Frames,
    rng: random.Random,
    sent: Sent,
) -> None:
    welcome = welcomed(line)
    rpc = _dealer(context, welcome, welcome.token + struct.pack(">I", 0))
    strangers = [
        _dealer(context, welcome, rng.randbytes(rng.choice((1, 20, 200)))),
        _dealer(context, welcome, welcome.token[:-1] + b"\0" + struct.pack(">I", 1)),
    ]
    sent.sessions += 1
    try:
        for _ in range(ON_RPC):
            to = rpc if rng.random() < 0.95 else rng.choice(strangers)
            parts = [
                frames.next() for _ in range(1 if rng.random() < 0.97 else rng.randrange(2, 9))
            ]
            with suppress(zmq.Again):
                to.send_multipart(parts, zmq.NOBLOCK)
                sent.frames += len(parts)
            if rng.random() < 0.05 and drained(line):
                sent.ended += 1
                return
        sent.answers += _await_answer(rpc, line)
    finally:
        for one in (rpc, *strangers):
            one.close(linger=0)


def _dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", welcome: protocol.Welcome, identity: bytes
) -> "zmq.Socket[bytes]":
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.ROUTING_ID, identity)
    made.connect(welcome.rpc)
    return made


def _await_answer(rpc: "zmq.Socket[bytes]", line: socket.socket) -> int:
    """Send a valid request, and read all answers up to its own; return their number."""
    mine = protocol.NUMBER_MAX - 1
    rpc.send(protocol.encode(protocol.Prefetch(mine, ())))
    poller = zmq.Poller()
    poller.register(rpc, zmq.POLLIN)
    poller.register(line.fileno(), zmq.POLLIN)
    answers = 0
    while True:
        ready = dict(poller.poll(int(PATIENCE_S * 1000)))
        if not ready:
            raise NoAnswer(f"rpc: no answer after {answers}")
        if line.fileno() in ready and drained(line):
            return answers
        if rpc in ready:
            reply = protocol.decode_reply(rpc.recv())
            answers += 1
            if reply.id == mine:
                return answers


# --- lifeline ----------------------------------------------------------------------------


def attack_lifeline(folder: Path, frames: Frames, count: int, rng: random.Random) -> Sent:
    sent = Sent()
    nowhere = os.open(os.devnull, os.O_RDWR)
    secret = os.memfd_create("fuzz")
    reading, writing = os.pipe()
    fds = (nowhere, secret, reading, writing)
    while sent.frames < count:
        with lifeline(folder) as line:
            sent.sessions += 1
            if rng.random() < 0.8:
                welcomed(line)
            try:
                for _ in range(ON_LIFELINE):
                    given = rng.choices(fds, k=rng.choice((0, 0, 0, 1, 3, 100)))
                    _send(line, frames.next(), given)
                    sent.frames += 1
                    if rng.random() < 0.3 and drained(line):
                        break
            except (BrokenPipeError, ConnectionResetError):
                sent.ended += 1
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)
            _await_end(line)
    for fd in fds:
        os.close(fd)
    return sent


def _send(line: socket.socket, data: bytes, fds: list[int]) -> None:
    with suppress(TimeoutError):
        try:
            socket.send_fds(line, [data or b"\xc0"], fds)
        except OSError as exc:
            if isinstance(exc, BrokenPipeError | ConnectionResetError):
                raise
            # longer than a packet: not sent


def _await_end(line: socket.socket) -> None:
    """Wait until the daemon ends a connection that its client has ended."""
    try:
        while True:
            data, fds = recv_packet(line, protocol.LIFELINE_MAX_BYTES)
            _close(fds)
            if not data:
                return
    except ConnectionResetError:
        return
    except TimeoutError:
        raise NoAnswer("lifeline: the daemon does not end it") from None


def _close(fds: list[OwnedFd]) -> None:
    for fd in fds:
        fd.close()


def main() -> None:
    folder, which, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    names = sys.argv[5:]
    messages, attack = {
        "rpc": (protocol.AnyRequest, attack_rpc),
        "lifeline": (protocol.FromClient, attack_lifeline),
    }[which]
    sent = attack(folder, Frames(messages, names, seed), count, random.Random(seed))
    print(msgspec.json.encode(sent).decode())  # noqa: T201


if __name__ == "__main__":
    main()
