"""`swapd top` shows a real daemon that swaps: with textual's pilot, and on a real terminal."""

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

import swapd_client
from swapd.cli.live.app import Poller, TextScreen, Top
from tests.contents import bytes_of

from .conftest import MIB, Running, environment, serve, swapd
from .test_stopped import stopped

Size = tuple[int, int]
SIZES = [(80, 24), (200, 50)]


class Watched(Top):
    """Sets an event whenever it has drawn."""

    def __init__(self, poller: Poller) -> None:
        self.drawn = asyncio.Event()
        super().__init__(poller, 30.0)

    def draw(self) -> None:
        super().draw()
        self.drawn.set()

    @property
    def text(self) -> str:
        return str(self._live.content)

    def told(self) -> str:
        return "\n".join(str(note.message) for note in self._notifications)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until that is true. The screen is drawn at least once a second."""
        async with asyncio.timeout(60):
            while not holds():
                self.drawn.clear()
                await self.drawn.wait()


@asynccontextmanager
async def on_screen(
    folder: Path, size: tuple[int, int]
) -> AsyncIterator[tuple[Watched, Pilot[None]]]:
    poller = Poller(folder, 30.0)
    await asyncio.to_thread(poller.start)
    app = Watched(poller)
    try:
        async with app.run_test(size=size) as pilot:
            yield app, pilot
    finally:
        await asyncio.to_thread(poller.close)


def row(app: Watched, name: str) -> str:
    return next((line for line in app.text.splitlines()[2:] if line.startswith(f"{name} ")), "")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_swap_is_seen_and_keys_pin_and_evict(
    daemon: Running, size: tuple[int, int]
) -> None:
    client = daemon.client("painter", dit=10, vae=10)
    client.acquire("dit").release()
    async with on_screen(daemon.folder, size) as (app, pilot):
        await app.until(lambda: "idle" in row(app, "dit") and "absent" in row(app, "vae"))
        with client.acquire("vae"):
            await app.until(lambda: "leased" in row(app, "vae") and "absent" in row(app, "dit"))
            assert "to make room for vae" in app.text
            assert "painter" in row(app, "vae")
            await pilot.press("down", "e")
            await app.until(lambda: "'vae' is leased by painter" in app.told())
        client.status()  # each request returns the leases that the client keeps for its next step
        await pilot.press("e")
        await app.until(lambda: "absent" in row(app, "vae"))
        await pilot.press("p")
        await app.until(
            lambda: "'vae' cannot stay" in app.told() or "vae cannot stay" in app.told()
        )
        client.unregister("dit")
        await app.until(lambda: not row(app, "dit"))
        await pilot.press("p")
        await app.until(lambda: "pinned" in row(app, "vae") and "idle" in row(app, "vae"))
        await pilot.press("u")
        await app.until(lambda: "pinned" not in row(app, "vae"))
        lines = app.text.splitlines()
        assert (len(lines), max(map(len, lines)) <= size[0]) == (size[1], True)


async def test_keys_sort_filter_help_and_tell_the_story(daemon: Running) -> None:
    client = daemon.client("painter", dit=4, vae=6)
    client.acquire("vae").release()
    async with on_screen(daemon.folder, (80, 24)) as (app, pilot):
        await app.until(lambda: row(app, "vae"))
        await pilot.press("s")
        assert app.text.index("vae ") < app.text.index("dit ")
        await pilot.press("slash", "d", "i", "enter")
        await app.until(lambda: not row(app, "vae") and row(app, "dit"))
        await pilot.press("escape")
        await app.until(lambda: row(app, "vae"))
        await pilot.press("home", "l")
        await app.until(lambda: isinstance(app.screen, TextScreen))
        assert isinstance(app.screen, TextScreen)
        assert "vae: " in app.screen.text.plain
        assert "ask vae by painter" in app.screen.text.plain
        await pilot.press("escape", "question_mark")
        assert isinstance(app.screen, TextScreen)
        assert "quit" in app.screen.text.plain
        await pilot.press("q")
        await pilot.resize_terminal(40, 10)
        await app.until(lambda: len(app.text.splitlines()) == 10)
        await pilot.resize_terminal(3, 2)
        await app.until(lambda: len(app.text.splitlines()) == 2)


async def test_it_waits_for_a_daemon_that_is_restarted(folder: Path) -> None:
    first = serve(folder)
    client = first.client("painter", dit=4)
    async with on_screen(folder, (80, 24)) as (app, pilot):
        await app.until(lambda: row(app, "dit"))
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(first.stop)
        await app.until(lambda: "the daemon is gone; waiting for it" in app.text)
        await pilot.press("p")
        await app.until(lambda: "no daemon is there" in app.told() or not row(app, "dit"))
        second = await asyncio.to_thread(serve, folder)
        try:
            with await asyncio.to_thread(swapd_client.connect, folder) as other:
                other.register("vae", {"w": bytes_of("vae", MIB)})
                await app.until(lambda: row(app, "vae") and not row(app, "dit"))
                assert "waiting for it" not in app.text
        finally:
            await asyncio.to_thread(second.stop)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    leader, follower = pty.openpty()
    yield leader, follower
    os.close(leader)


@pytest.fixture
def shown(daemon: Running, terminal: tuple[int, int]) -> Iterator["subprocess.Popen[bytes]"]:
    """`swapd top` on the terminal, once it shows the daemon's component dit."""
    daemon.client("painter", dit=4)
    leader, follower = terminal
    with subprocess.Popen(
        [sys.executable, "-m", "swapd", "top", "-e", str(daemon.folder), "--timeout", "600"],
        env=environment(NO_COLOR="1", TERM="xterm-256color", COLUMNS="80", LINES="24"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        try:
            _until(leader, b"painter")
            yield process
        finally:
            process.kill()


def _until(leader: int, word: bytes) -> None:
    seen = b""
    while word not in seen:
        seen += os.read(leader, 65536)


def _rest(leader: int) -> bytes:
    seen = b""
    while True:
        try:
            seen += os.read(leader, 65536)
        except OSError:  # EIO: the process has left the terminal
            return seen


def test_it_runs_on_a_terminal_until_q(
    shown: "subprocess.Popen[bytes]", terminal: tuple[int, int]
) -> None:
    os.write(terminal[0], b"q")
    assert b"Traceback" not in _rest(terminal[0])
    assert shown.wait(60) == 0


def test_it_ends_though_the_daemon_does_not_answer_a_key(
    shown: "subprocess.Popen[bytes]", terminal: tuple[int, int], daemon: Running
) -> None:
    leader, _ = terminal
    with stopped(daemon):
        os.write(leader, b"p?")
        _until(leader, b"its records, each under its cause")
        os.write(leader, b"qq")
        assert b"Traceback" not in _rest(leader)
        assert shown.wait(60) == 0


def test_it_says_what_it_lacks(daemon: Running, folder: Path) -> None:
    nowhere = swapd("top", "-e", folder / "nowhere", status=1)
    assert len(nowhere.stderr.splitlines()) == 1
    assert "no swapd" in nowhere.stderr.lower() or "nowhere" in nowhere.stderr
    assert "needs a terminal" in swapd("top", "-e", daemon.folder, status=2).stderr
