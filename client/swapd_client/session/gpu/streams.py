"""The process's streams: the current one, and waits of streams for a component's arrival."""

import sys
import threading
import time
from typing import Any

from swapd.device.context import CudaError
from swapd.shared.board import BOARD_BYTES, Board, place
from swapd_client.errors import DeviceFailed, InvalidArgument
from swapd_client.session.gpu.card import SETTLE_S, Card

#: The default stream; other streams wait for it unless they are non-blocking.
LEGACY_DEFAULT = 0


def handle_of(stream: Any) -> int:
    """Return the driver's handle of a stream. Raises: InvalidArgument."""
    try:
        handle = int(getattr(stream, "cuda_stream", stream))
        if 0 <= handle < 1 << 64:
            return handle
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(f"stream={stream!r}: give a torch.cuda.Stream, or the driver's handle")


def _torch_on_gpu() -> Any:
    """Return torch if it uses a GPU in this process; None while another thread imports it."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def current_stream(index: int) -> int:
    """Return the current stream of this thread's torch, or the default if torch uses no GPU."""
    torch = _torch_on_gpu()
    if torch is None:
        return LEGACY_DEFAULT
    return int(torch.cuda.current_stream(index).cuda_stream)


def lasting_stream(index: int) -> int | None:
    """As `current_stream`, if it is never destroyed: the default, or one of torch's own."""
    torch = _torch_on_gpu()
    if torch is None:
        return LEGACY_DEFAULT
    stream = torch.cuda.current_stream(index)
    # c10/cuda/CUDAStream.cpp: 0 is the default; the id of an external stream is its (even) address
    return int(stream.cuda_stream) if stream.stream_id == 0 or stream.stream_id & 1 else None


def empty_cache() -> None:
    torch = _torch_on_gpu()
    if torch is not None:
        torch.cuda.empty_cache()


#: Pinned boards must stay mapped, even if their session is lost.
_pinned: set[Board] = set()


class Doorbell:
    """The session's board on the GPU: streams can wait for words on it."""

    def __init__(self, card: Card, board: Board) -> None:
        """Does not use the GPU."""
        self._card = card
        self._board = board
        self._lock = threading.Lock()
        self._address: int | None = None
        self._refused = False
        #: By stream, the event after its last wait: the stream itself may be gone by then.
        self._passed: dict[int, Any] = {}

    def wait(self, stream: int, slot: int, target: int) -> bool:
        """Make the stream wait until the word in `slot` is at least `target`. Does not block.

        Returns False if the stream captures, or this GPU or driver cannot wait. Raises:
        DeviceFailed.
        """
        with self._lock, self._card.using() as driver:
            if self._refused or driver.is_capturing(stream) or not self._open():
                return False  # a replayed graph would wait for this old word each time
            assert self._address is not None
            try:
                driver.wait_value(stream, self._address + place(slot), target)
            except CudaError as exc:
                if exc.name != "CUDA_ERROR_NOT_SUPPORTED":
                    raise
                self._refused = True
                return False
            if stream not in self._passed:
                self._passed[stream] = driver.event()
            driver.record(self._passed[stream], stream)
            return True

    def close(self, timeout_s: float = SETTLE_S) -> None:
        """Unpin the board when no stream waits on it, within `timeout_s`.

        All words must have been raised before.
        """
        with self._lock:
            if self._address is None:
                return
            deadline = time.monotonic() + timeout_s
            try:
                with self._card.using() as driver:
                    while not all(driver.query(event) for event in self._passed.values()):
                        if time.monotonic() > deadline:
                            return
                        time.sleep(0.001)
                    for event in self._passed.values():
                        driver.destroy_event(event)
                    driver.unpin(self._board.address)
                    _pinned.discard(self._board)
            except DeviceFailed as exc:
                self._card.complain(exc)
            self._address = None
            self._passed.clear()

    def _open(self) -> bool:
        if self._address is not None:
            return True
        with self._card.using() as driver:
            able = driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS")
            try:
                if able:
                    self._address = driver.pin_for_flags(self._board.address, BOARD_BYTES)
                    _pinned.add(self._board)
            except CudaError:
                able = 0
        self._refused = not able
        return bool(able)
