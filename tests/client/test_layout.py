"""A layout has each item aligned, in order, with its exact bytes."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.shared import vm
from swapd_client.errors import InvalidSource, SwapdError
from swapd_client.memory.layout import ALIGN_BYTES, Buffer, BufferLayout, Packer
from tests.client.filled import fill

SPAN = 1 << 20


@pytest.fixture(scope="module")
def memory() -> Iterator[int]:
    address = vm.map_anonymous(SPAN)
    yield address
    vm.free(address, SPAN)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2000)))
def test_places_are_aligned_in_order_and_do_not_overlap(sizes: list[int]) -> None:
    packer = Packer()
    end = 0
    for nbytes in sizes:
        place = packer.place(nbytes)
        assert place % ALIGN_BYTES == 0
        assert end <= place < end + ALIGN_BYTES
        end = place + nbytes
        assert packer.nbytes == end


def test_a_name_alone_is_a_segment_and_not_its_letters() -> None:
    buffers = {"01": b"first", "0": b"second", "1": b"third"}
    alone = BufferLayout(buffers, ["01", "0", "1"])
    assert alone.segments == BufferLayout(buffers, [["01"], ["0"], ["1"]]).segments


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=700), max_size=8))
def test_every_buffer_comes_back_at_its_stable_place(buffers: dict[str, bytes]) -> None:
    layout = BufferLayout(buffers)
    address = vm.map_anonymous(vm.round_up(layout.nbytes + 1))
    fill(layout, address)
    layout.bind(address)
    for name, content in buffers.items():
        assert bytes(layout.view(name, address)) == content
    vm.free(address, vm.round_up(layout.nbytes + 1))


@pytest.mark.parametrize(
    "buffer",
    [
        b"bytes",
        bytearray(b"bytes"),
        memoryview(b"-bytes-")[1:6],
        np.arange(12, dtype=np.int64).reshape(3, 4),
        np.arange(6, dtype=np.float16),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.zeros(2, [("a", "f4"), ("b", "i1")]),
    ],
    ids=lambda b: type(b).__name__,
)
def test_whatever_memoryview_takes_is_a_source(buffer: Buffer, memory: int) -> None:
    layout = BufferLayout({"first": b"x" * 7, "it": buffer})
    fill(layout, memory)
    layout.bind(memory)
    assert bytes(layout.view("it", memory)) == memoryview(buffer).tobytes()
    assert layout.view("it", memory).nbytes == memoryview(buffer).nbytes


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (memoryview(b"abcdef")[::2], "'it' is not contiguous; copy it first"),
        (np.arange(6).reshape(2, 3).T, "'it' is not contiguous; copy it first"),
        (5, "'it' is not a buffer: .*not 'int'"),
        ("text", "'it' is not a buffer: .*not 'str'"),
        (np.zeros(2, "M8[s]"), "'it' is not a buffer: .*dtype 'M'"),
    ],
    ids=["slice", "transposed", "int", "str", "dates"],
)
def test_what_cannot_be_moved_is_refused_by_name(buffer: Buffer, why: str) -> None:
    with pytest.raises(InvalidSource, match=why) as refused:
        BufferLayout({"good": b"x", "it": buffer})
    assert isinstance(refused.value, SwapdError)
    assert isinstance(refused.value, ValueError)


def test_the_source_is_let_go_once_it_is_bound(memory: int) -> None:
    source = bytearray(b"12345")
    layout = BufferLayout({"a": source})
    with pytest.raises(BufferError):
        source.extend(b"6")  # the buffer still has a user
    fill(layout, memory)
    layout.bind(memory)
    layout.let_go()
    source.extend(b"6")
    assert bytes(layout.view("a", memory)) == b"12345"


def test_the_hash_tells_layouts_apart_and_not_their_bytes() -> None:
    layout = BufferLayout({"a": b"123", "b": b"4567"}).digest()
    assert layout == BufferLayout({"a": b"abc", "b": b"defg"}).digest()
    others: list[dict[str, Buffer]] = [
        {"a": b"123", "c": b"4567"},
        {"a": b"1234", "b": b"567"},
        {"b": b"4567", "a": b"123"},
        {"a": b"123"},
    ]
    assert layout not in [BufferLayout(other).digest() for other in others]
