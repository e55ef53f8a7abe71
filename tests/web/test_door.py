"""The door shows the page to permitted browsers, and answers all others with a refusal."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from swapd.cli.page import TOKEN_MAX, Page, open_page, parse_address
from swapd.shared.config import HTTP_TOKEN_VARIABLE, Config, ConfigError, load
from swapd.web.door import FORM_MAX_BYTES, Door
from tests.web.conftest import Answer, free_port

TOKEN = "0123456789abcdef-token"


async def _inside(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(
    path: str,
    method: str = "GET",
    body: bytes = b"",
    *,
    token: str = TOKEN,
    loopback: bool = False,
    **headers: str,
) -> Answer:
    """The answer of a door to a request."""
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    given = {"host": "gpu-7:9470", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in given.items()],
    }
    door = Door(_inside, token, loopback=loopback, policy="default-src 'none'")
    asyncio.run(door(scope, receive, send))
    begin, *rest = said
    told = {name.decode(): value.decode() for name, value in begin["headers"]}
    return Answer(begin["status"], told, b"".join(each.get("body", b"") for each in rest))


@pytest.mark.parametrize("path", ["/", "/events", "/status", "/metrics", "/nothing"])
def test_nothing_is_told_without_the_token(path: str) -> None:
    tries: tuple[dict[str, Any], ...] = (
        {},
        {"authorization": "Bearer " + TOKEN[:-1]},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer é"},
        {"authorization": f"Basic {TOKEN}"},
        {"cookie": f"swapd={TOKEN}"},
        {"cookie": "swapd="},
    )
    for headers in tries:
        answer = ask(path, **headers)
        assert answer.status == 401
        assert b"inside" not in answer.body
        assert answer.headers["content-security-policy"]


def test_who_has_the_token_is_let_in() -> None:
    assert ask("/metrics", authorization=f"Bearer {TOKEN}").text == "inside"


def test_a_browser_is_let_in_by_a_cookie_that_no_script_reads_and_that_is_not_the_token() -> None:
    answer = ask("/login", "POST", f"token={TOKEN}".encode())
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie, *terms = answer.headers["set-cookie"].split("; ")
    assert {term.lower() for term in terms} >= {"httponly", "samesite=strict"}
    assert TOKEN not in cookie
    assert ask("/", cookie=cookie).text == "inside"
    assert ask("/", cookie=cookie, token="another-token-of-this-page").status == 401


@pytest.mark.parametrize(
    "body", [b"", b"token=", b"token=wrong", b"\xff\xfe", b"token=" + b"x" * FORM_MAX_BYTES]
)
def test_a_form_with_anything_else_lets_nobody_in(body: bytes) -> None:
    answer = ask("/login", "POST", body)
    assert answer.status in (401, 413)
    assert "set-cookie" not in answer.headers


def test_whether_it_is_healthy_is_told_to_all() -> None:
    assert ask("/healthz").text == "inside"


def test_a_token_is_needed_on_the_loopback_too_if_there_is_one() -> None:
    assert ask("/", token="", loopback=True, host="localhost:9470").text == "inside"
    assert ask("/", loopback=True, host="localhost:9470").status == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:9470", "["])
def test_the_loopback_is_served_by_its_own_names_alone(host: str) -> None:
    assert ask("/", token="", loopback=True, host=host).status == 421


# --- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:9470"])
def test_an_address_that_others_reach_needs_a_token(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HTTP_TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="--http-token-file"):
        open_page(Config(http=address))


@pytest.mark.parametrize(
    "text", ["9470", "localhost", ":9470", "example.org:80", "127.0.0.1:99999", "::1:80", "[]:1"]
)
def test_what_is_no_address_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9470"):
        parse_address(text)


def test_only_the_loopback_is_taken_for_it() -> None:
    for text in ("127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1"):
        assert parse_address(text).loopback
    for text in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1"):
        assert not parse_address(text).loopback


@pytest.mark.parametrize(
    "token", ["", "short", "x" * (TOKEN_MAX + 1), "has a space in it here", "é" * 20]
)
def test_a_token_that_could_be_guessed_or_typed_by_nobody_is_refused(
    token: str, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(token + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="token"):
        open_page(Config(http="127.0.0.1:0", http_token_file=str(path)))


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        open_page(Config(http="127.0.0.1:0", http_token_file=str(tmp_path / "nowhere")))


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(HTTP_TOKEN_VARIABLE, TOKEN)
    for config in (
        Config(http="0.0.0.0:0", http_token_file=str(path)),
        load(None, {"http": "0.0.0.0:0"}, {HTTP_TOKEN_VARIABLE: TOKEN}),
    ):
        page = open_page(config)
        assert page is not None
        page.close()


def test_an_address_that_is_taken_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapd.cli.page.TAKEN_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}: Address already in use; choose another"):
            open_page(Config(http=address))


def test_nothing_listens_unless_it_is_told_to() -> None:
    assert open_page(Config()) is None
    page = Page(parse_address(f"127.0.0.1:{free_port()}"), "")
    page.close()  # before its start
