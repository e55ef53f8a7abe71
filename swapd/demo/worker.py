"""One stage in its own process: build it, then run it, with or without swapd."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from swapd.demo import stages
from swapd.demo.wire import Tensors, pack, unpack


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run the stage once. The thinker takes a prompt and a sound's seed, the rest `inputs`."""

    prompt: bytes = b""
    sound_seed: int = 0
    inputs: bytes = b""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Move the weights into swapd; every run from now on holds a lease."""


class Built(msgspec.Struct, frozen=True, tag="built"):
    nbytes: int


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    outputs: bytes
    waited_s: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    why: str


read_answer = msgspec.msgpack.Decoder(Built | Ran | Failed).decode
_command = msgspec.msgpack.Decoder(Run | Join).decode


def main(connection: Connection, stage: str, seed: int, endpoint: str) -> None:
    """Serve commands until the other side hangs up. Runs in a spawned process."""
    try:
        _serve(connection, stage, seed, endpoint)
    except EOFError:
        return
    except Exception as exc:  # noqa: BLE001 - the demo must get any error
        connection.send_bytes(msgspec.msgpack.encode(Failed(f"{type(exc).__name__}: {exc}")))


def _serve(connection: Connection, stage: str, seed: int, endpoint: str) -> None:
    import swapd_client

    torch.set_num_threads(1)
    module = stages.build(stage, seed)
    _answer(connection, Built(stages.parameter_bytes(module)))
    with swapd_client.connect(endpoint, label=stage) as client:
        joined = False
        while True:
            command = _command(connection.recv_bytes())
            if isinstance(command, Join):
                client.register(stage, module)
                joined = True
                _answer(connection, Ran(b"", 0.0))
            elif joined:
                started = time.perf_counter()
                with client.acquire(stage):
                    waited_s = time.perf_counter() - started
                    outputs = _run(stage, module, command)
                _answer(connection, Ran(pack(outputs), waited_s))
            else:
                _answer(connection, Ran(pack(_run(stage, module, command)), 0.0))


def _run(stage: str, module: torch.nn.Module, command: Run) -> Tensors:
    if stage == "thinker":
        sound = stages.generate_sound(1.0, command.sound_seed)
        return stages.run_thinker(module, command.prompt, sound)
    later: dict[str, Callable[[Any, Tensors], Tensors]] = {
        "talker": stages.run_talker,
        "token2wav": stages.run_token2wav,
    }
    return later[stage](module, unpack(command.inputs))


def _answer(connection: Connection, answer: msgspec.Struct) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))
