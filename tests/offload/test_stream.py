"""A component block by block, in one process and against a real daemon.

Isolation is strict: a block that is touched without being held ends the test.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client
from swapd_client.offload.stream import Stream

#: A chunk of the host device, which is what a block takes.
BLOCK = 2 << 20


class Model(NamedTuple):
    """A family of blocks whose bytes say which they are."""

    client: Client
    stream: Stream
    blocks: int

    def use(self, part: int) -> None:
        """What a block's forward does: read all of it."""
        view = self.client.session.own(self.stream.parts[part]).view("w")
        assert view == bytes([part + 1]) * len(view)

    def run(self, part: int) -> None:
        self.stream.need(part)
        try:
            self.use(part)
        finally:
            self.stream.done(part)

    def forward(self, order: Sequence[int] = ()) -> None:
        self.stream.enter()
        try:
            for part in order or range(self.blocks):
                self.run(part)
        finally:
            self.stream.leave()

    def states(self) -> dict[str, str]:
        return {c.name: c.state for c in self.client.status().components}

    def held(self) -> list[str]:
        return [c.name for c in self.client.status().components if c.leases]

    def resident(self) -> set[str]:
        return {n for n, state in self.states().items() if state not in ("absent", "revoking")}


def family(
    client: Client,
    blocks: int,
    *,
    resident: int | str | None = 0,
    slots: int = 2,
    rest: bool = True,
    name: str = "m",
) -> Model:
    parts = {"rest": {"w": b"\0"}} if rest else {}
    parts |= {str(i): {"w": bytes([i + 1]) * BLOCK} for i in range(blocks)}
    made = [c.name for c in client.register_family(name, parts, resident=resident)]
    stream = Stream(client, name, made.pop(0) if rest else None, made, slots)
    return Model(client, stream, blocks)


@contextmanager
def swapd(blocks: int, isolation: str = "strict") -> Iterator[Client]:
    """A daemon whose memory is so many blocks, and a client of it."""
    with (
        spawn.daemon(budget=blocks * BLOCK, isolation=isolation) as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        yield client


# --- a pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_than_its_slots_are_on_the_device_at_a_time(slots: int) -> None:
    # not strict: there what is released takes room until its worker has let go of it
    with swapd(12, "relaxed") as client:
        model = family(client, 8, slots=slots)
        for _ in range(3):
            model.forward()
        status = client.status()
        assert model.held() == []
        assert status.peak_bytes == (slots + 1) * BLOCK, "beside them, what is in no block"


@pytest.mark.parametrize(("resident", "kept"), [(0, ""), (2, "26"), (4, "1357"), (8, "01234567")])
def test_what_is_kept_is_spread_and_is_not_copied_again(resident: int, kept: str) -> None:
    with swapd(12) as client:
        model = family(client, 8, resident=resident * BLOCK + 1)
        for _ in range(5):
            model.forward()
        loads = {c.name: c.loads for c in client.status().components}
        assert {i for i in "01234567" if loads[f"m/{i}"] == 1} == set(kept)
        assert loads["m/rest"] == 1
        assert all(n >= 5 for n in loads.values() if n != 1), "the others at each pass"


def test_a_pass_over_what_is_all_in_is_one_lease() -> None:
    with swapd(12) as client:
        model = family(client, 8, resident="1GiB")
        model.forward()
        stream = model.stream
        before = client.status().hits
        stream.enter()
        assert sorted(model.held()) == sorted(stream.everything)
        for part in range(8):
            model.run(part)
        assert client.status().hits == before + len(stream.everything)
        stream.leave()
        assert model.held() == []


def test_how_much_is_kept_changes_while_it_runs() -> None:
    with swapd(12) as client:
        model = family(client, 8, resident=None)
        for size in (0, None, 4 * BLOCK + 1, None):
            client.set_resident("m", size)
            for _ in range(3):
                model.forward()
            assert len(model.resident()) == {0: 3, None: 9, 4 * BLOCK + 1: 7}[size]
            client.set_resident("m", 0)
            assert len(model.resident() - {"m/rest"}) <= 2, "two of them may be on their way"
