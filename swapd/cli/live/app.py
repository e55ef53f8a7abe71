"""The live view in a terminal: draws the lines of `screen`, and acts on keys.

A thread polls the daemon for its status and last records, and waits while no daemon is there.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from swapd.cli.conclusions import report
from swapd.cli.last_lines import LastLines
from swapd.cli.live import screen
from swapd.cli.live.screen import Snapshot
from swapd.cli.story import story
from swapd.cli.target import connected
from swapd.log.reader import last_run, read
from swapd.log.records import SchemaMismatch
from swapd.shared.runtime_dir import RuntimeDirError
from swapd.shared.text import plain, reason
from swapd_client import Client
from swapd_client.errors import NotRunning, SwapdError, Timeout

LINES_MAX = 200
#: Seconds between two requests for the status, or attempts to connect.
POLL_S = 0.5


class Poller:
    """Keeps `view` up to date from `start` to `close`; each update is a new object."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.view: Snapshot
        #: None while no daemon is there.
        self.client: Client | None = None
        self._folder, self._timeout = folder, timeout
        self._lines: LastLines | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swapd-top", daemon=True)

    def start(self) -> None:
        """Connect, then poll in a thread. Raises: SwapdError, OSError if no daemon is there now."""
        self._connect()
        self._thread.start()

    def close(self, within_s: float | None = None) -> None:
        """End the thread and the connection. Blocks until a pending answer came, for `within_s` at
        most; then only the end of the process ends them."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                if self.client is None:
                    self._connect()
                else:
                    self._poll(self.client)
            except Timeout as exc:
                self._say(str(exc))
            except (NotRunning, RuntimeDirError, OSError):
                self._disconnect("the daemon is gone; waiting for it to come back")
            except SwapdError as exc:
                gone = self.client is not None and self.client.session.error is not None
                why = "the daemon is gone; waiting for it to come back" if gone else str(exc)
                self._disconnect(why)
        self._disconnect("")

    def _connect(self) -> None:
        client = connected(self._folder, "top", self._timeout)
        try:
            self._poll(client)
        except BaseException:
            client.close()
            raise
        self.client = client

    def _poll(self, client: Client) -> None:
        status = report(client.status(timeout=self._timeout))
        at = time.monotonic()
        if self._lines is None:
            self._lines = LastLines(Path(status.swap_log), LINES_MAX)
        self._lines.read(status.sessions)
        self.view = Snapshot(status, tuple(self._lines.lines), at)

    def _disconnect(self, why: str) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        self._say(why)

    def _say(self, amiss: str) -> None:
        if self.view.amiss != amiss:
            self.view = self.view._replace(amiss=amiss)


DRAW_S = 0.1
#: Seconds after which an unchanged view is drawn again, as ages grow.
_AGES_S = 1.0
_DONE = {"pin": "is pinned: it stays", "unpin": "may be evicted", "evict": "leaves"}
_STORY_MAX = 1000


class LivePanel(Static):
    DEFAULT_CSS = "LivePanel { width: 100%; height: 1fr; }"

    def on_resize(self) -> None:
        assert isinstance(self.app, Top)
        self.app.draw()


class TextScreen(ModalScreen[None]):
    DEFAULT_CSS = "TextScreen { background: $background; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l,enter,question_mark", "dismiss", "Back")
    ]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self.text, markup=False)


class Top(App[None]):
    """The caller starts and closes `poller`."""

    CSS = """
    Input { dock: bottom; display: none; height: 1; border: none; }
    Input.asked { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("p", "ask('pin')", "Pin"),
        Binding("u", "ask('unpin')", "Unpin"),
        Binding("e", "ask('evict')", "Evict"),
        Binding("l,enter", "story", "Story"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "unfilter", "Show all"),
        Binding("question_mark", "help", "Help"),
        Binding("up,k", "move(-1)", "Up"),
        Binding("down,j", "move(1)", "Down"),
        Binding("pageup", "move(-10)", "Page up"),
        Binding("pagedown", "move(10)", "Page down"),
        Binding("home", "move(-1000000)", "First"),
        Binding("end", "move(1000000)", "Last"),
    ]

    def __init__(self, poller: Poller, timeout: float) -> None:
        super().__init__()
        self.poller = poller
        self.choice = screen.Choice()
        self._timeout = timeout
        self._live = LivePanel()
        self._filter = Input(placeholder="only names with", compact=True)
        self._filter.can_focus = False  # until the filter opens, keys are commands
        self._drawn: screen.Snapshot | None = None
        self._drawn_at = 0.0

    def compose(self) -> ComposeResult:
        yield self._live
        yield self._filter

    def on_mount(self) -> None:
        self.set_interval(DRAW_S, self._draw_if_due)
        self.draw()

    # --- drawing -------------------------------------------------------------------------

    def _draw_if_due(self) -> None:
        now = time.monotonic()
        if self.poller.view is not self._drawn or now - self._drawn_at >= _AGES_S:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        width, height = self._live.size
        self._drawn = self.poller.view
        lines = screen.lines(self._drawn, self.choice, width, height, self._drawn_at)
        text = Text("\n", no_wrap=True, overflow="crop").join(lines)
        self._live.update(text, layout=False)

    # --- the choice ----------------------------------------------------------------------

    def action_sort(self) -> None:
        self.choice.sort_next()
        self.draw()

    def action_move(self, by: int) -> None:
        every = screen.all_rows(self.poller.view, time.monotonic())
        self.choice.move(screen.listed(every, self.choice), by)
        self.draw()

    def action_filter(self) -> None:
        self._filter.can_focus = True
        self._filter.add_class("asked")
        self._filter.value = self.choice.only
        self._filter.focus()

    def action_unfilter(self) -> None:
        self.choice.only = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._filter.has_class("asked"):
            self.choice.only = event.value
            self.draw()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self._filter.remove_class("asked")
        self._filter.can_focus = False
        self.set_focus(None)
        self.draw()

    def action_help(self) -> None:
        self.push_screen(TextScreen(Text(screen.HELP)))

    # --- asking the daemon ---------------------------------------------------------------

    def action_ask(self, what: str) -> None:
        if self.choice.selected:
            _in_thread(self._ask, self.choice.selected, what)

    def _ask(self, name: str, what: str) -> None:
        client = self.poller.client
        if client is None:
            self._tell("no daemon is there to be asked", error=True)
            return
        try:
            getattr(client, what)(name, timeout=self._timeout)
            if what == "pin":
                client.prefetch(name, timeout=None)
        except SwapdError as exc:
            self._tell(plain(str(exc)), error=True)
        else:
            self._tell(f"{plain(name)} {_DONE[what]}")

    def _tell(self, text: str, *, error: bool = False) -> None:
        severity = "error" if error else "information"
        with suppress(RuntimeError):  # the app has ended meanwhile
            self.call_from_thread(self.notify, text, severity=severity, markup=False)

    def action_story(self) -> None:
        if self.choice.selected:
            path = Path(self.poller.view.status.swap_log)
            _in_thread(self._show_story, self.choice.selected, path)

    def _show_story(self, name: str, log: Path) -> None:
        try:
            lines = list(story(last_run(read(log)), name))
        except (OSError, SchemaMismatch) as exc:
            self._tell(reason(exc), error=True)
            return
        if not lines:
            self._tell(f"the swap log does not have {plain(name)}", error=True)
            return
        left_out = len(lines) - _STORY_MAX
        if left_out > 0:
            lines = [lines[0], Text(f"... {left_out} lines before", "dim"), *lines[-_STORY_MAX:]]
        text = Text("\n").join(lines)
        with suppress(RuntimeError):
            self.call_from_thread(self.push_screen, TextScreen(text))


def _in_thread(do: Callable[..., None], *about: object) -> None:
    """Run it in a thread for which the end of the program does not wait, as it would for a worker
    of textual: a daemon that is stopped does not answer."""
    threading.Thread(target=do, args=about, name="swapd-top-key", daemon=True).start()
