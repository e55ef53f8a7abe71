"""The page in a real Chromium: it loads, shows a swap in progress, and outlives the daemon."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guarantees.harness import PATIENCE_S
from tests.web.conftest import MIB, Served

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

#: A name that would run a script if it were taken for HTML.
EVIL = "<img src=x onerror=\"document.title='taken'\">"
#: Errors of a browser while the daemon is down.
WHILE_AWAY = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


def test_the_page_shows_a_swap_while_it_happens_and_survives_a_restart(browser: Any) -> None:
    one = Served(bandwidth="4MB/s")  # a swap takes seconds, so that a busy machine shows it, too
    said: list[str] = []
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.set_default_timeout(1000 * PATIENCE_S)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    asked: set[str] = set()
    try:
        page.goto(one.url)
        page.wait_for_selector("#link.live")
        with one.connect("<i>worker</i>") as client:
            client.register("thinker", {"w": bytearray(14 * MIB)})
            client.register(EVIL, {"w": bytearray(4 * MIB)})
            client.prefetch("thinker")
            page.wait_for_selector("#rows tr:has-text('thinker') .loading")
            page.wait_for_selector("#rows tr:has-text('thinker') .idle")
            lease = client.acquire(EVIL)
            row = page.wait_for_selector("#rows tr:has-text('onerror')")
            page.wait_for_selector("#rows tr:has-text('thinker') .absent")
            page.wait_for_selector("#rows tr:has-text('onerror') .leased")
            assert EVIL in row.inner_text()
            assert "<i>worker</i>" in page.inner_text("#rows")
            assert "evict" in page.inner_text("#lines")
            lease.release()
        assert page.title() == "swapd"
        assert page.query_selector("img") is None
        assert said == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, "it can be scrolled sideways"
        one.daemon.terminate()
        page.wait_for_selector("#link.lost")
        one.daemon.wait()
        one.daemon.close()
        one.start()
        page.wait_for_selector("#link.live")
        with one.connect() as client:
            client.register("after", {"w": bytearray(MIB)})
            page.wait_for_selector("#rows tr:has-text('after')")
        assert "thinker" not in page.inner_text("#rows")
        assert [each for each in said if not any(away in each for away in WHILE_AWAY)] == []
        assert all(url.startswith((one.url, "data:")) for url in asked)
    finally:
        page.close()
        one.close()
