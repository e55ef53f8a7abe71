"""Several threads fill a host copy from files: every byte, and no thread outlives the load."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from swapd_client import Client, Component, InvalidSource
from swapd_client.weights import contents
from tests.weights.test_update import await_host_copies

KIB = 1 << 10
PAUSE_S = 30.0


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Tensors of two files, over many steps of four threads; most are not whole pages."""
    monkeypatch.setattr(contents, "_STEP_BYTES", 64 * KIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    torch.manual_seed(0)
    sizes = [1, 300 * KIB + 1, 4096, 64 * KIB, 0, 7, 200 * KIB - 3, 65 * KIB]
    made = {f"t{i}": torch.randint(256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    names = list(made)
    for i, part in enumerate((names[:5], names[5:])):
        save_file({name: made[name] for name in part}, tmp_path / f"{i}.safetensors")
    return made


def helps(monkeypatch: pytest.MonkeyPatch, how: Callable[..., int]) -> None:
    """Let `how` read beside the caller's thread, which waits until one of the others has begun."""
    begun, move = threading.Event(), contents._move

    def beside(*arguments: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
        return how(*arguments)

    def here(*arguments: Any) -> None:
        assert begun.wait(PAUSE_S)
        move(*arguments)

    monkeypatch.setattr(contents, "_read_mapped", beside)
    monkeypatch.setattr(contents, "_move", here)


def is_right(client: Client, loaded: Component, tensors: dict[str, torch.Tensor]) -> None:
    with client.acquire(loaded.name):
        for name, tensor in tensors.items():
            assert loaded.tensors[name].equal(tensor), name


def nothing_is_left(client: Client) -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("swapd-fill")]
    assert client.status().components == ()
    await_host_copies(client, 0)


def test_every_byte_comes_at_its_place_whichever_thread_reads_it(
    client: Client,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, names = contents._read_mapped, set()
    told: list[tuple[int, int]] = []

    def noted(*arguments: Any) -> int:
        names.add(threading.current_thread().name)
        return read(*arguments)

    def tell(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append((done, total))

    helps(monkeypatch, noted)
    loaded = client.load("x", tmp_path, progress=tell)
    is_right(client, loaded, tensors)
    assert 1 <= len(names) < contents._THREADS_MAX
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_the_error_of_any_thread_reaches_the_caller(
    client: Client,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    helps(monkeypatch, contents._read_mapped)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InvalidSource, match="cannot be read: Input/output error"):
        client.load("x", tmp_path)
    nothing_is_left(client)


def test_after_an_interrupt_no_thread_fills_on(
    client: Client,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, go_on = contents._read_mapped, threading.Event()

    def paused(*arguments: Any) -> int:
        assert go_on.wait(PAUSE_S)
        return read(*arguments)

    def stop(done: int, total: int) -> NoReturn:
        go_on.set()
        raise KeyboardInterrupt

    helps(monkeypatch, paused)
    with pytest.raises(KeyboardInterrupt):
        client.load("x", tmp_path, progress=stop)
    nothing_is_left(client)


def test_without_any_further_thread_one_does_all(
    client: Client,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("swapd-fill"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    is_right(client, client.load("x", tmp_path), tensors)


def test_what_a_thread_cannot_map_the_caller_s_does(
    client: Client,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    helps(monkeypatch, refuse)
    is_right(client, client.load("x", tmp_path), tensors)
