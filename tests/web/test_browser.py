"""The page in a real Chromium: it loads, shows a swap in progress, and outlives the daemon."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.files import file_with
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


def test_a_token_comes_from_the_address_and_what_was_shown_stays_when_the_daemon_dies(
    browser: Any, tmp_path: Path
) -> None:
    token = "0123456789abcdef"
    file = file_with(tmp_path / "token", token)
    file.chmod(0o600)
    one = Served(http_token_file=file)
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    try:
        page.goto(one.url)
        page.wait_for_selector("#link:has-text('needs its token')")
        assert page.inner_text("#rows") == ""
        page.goto(f"{one.url}#{token}")
        page.wait_for_selector("#link.live")
        assert page.context.cookies() == []
        client = one.connect()
        for at in range(121):
            client.register(f"c{at}", {"w": bytearray(100)})
        client.acquire("c0").release()
        page.wait_for_selector("#more-past:has-text('1 more component is not drawn')")
        page.wait_for_selector("#bar div[title^='c0: 100 B in 1 chunks'] .rounding")
        one.daemon.kill()
        page.wait_for_selector("body.gone #rows tr:has-text('c0')")
        client.close()
    finally:
        page.close()
        one.close()
