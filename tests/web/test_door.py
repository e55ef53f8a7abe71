"""Who may read the page: by its token, and by the name that is asked for."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from swapd.cli.page import TOKEN_MAX, open_page, parse_address
from swapd.shared.config import HTTP_TOKEN_VARIABLE, Config, ConfigError, load
from swapd.web.http import AccessRules, HttpRequest
from tests.files import file_with

TOKEN = "0123456789abcdef-token"


def ask(
    path: str, *, token: str = TOKEN, bound: str = "192.0.2.1", host: str = "gpu-7", **more: str
) -> int:
    """The status of the answer to a request; 200 if it is let in."""
    headers = {"host": f"{host}:9470", **more}
    refusal = AccessRules(token, bound).refusal(HttpRequest(path, "", headers))
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("path", ["/status", "/records", "/metrics", "/nothing"])
def test_nothing_is_told_without_the_token(path: str) -> None:
    tries: tuple[dict[str, Any], ...] = (
        {},
        {"authorization": "Bearer " + TOKEN[:-1]},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer \xe9"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer"},
        {"cookie": f"swapd={TOKEN}"},
    )
    for headers in tries:
        assert ask(path, **headers) == 401
    for given in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert ask(path, authorization=given) == 200
    assert ask("/") == ask("/healthz") == 200


def test_a_token_is_needed_on_the_loopback_too_if_there_is_one() -> None:
    assert ask("/status", token="", bound="127.0.0.1", host="localhost") == 200
    assert ask("/status", bound="127.0.0.1", host="localhost") == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]", "["])
def test_without_a_token_only_the_address_s_own_names_are_served(host: str) -> None:
    assert ask("/", token="", bound="127.0.0.1", host=host) == 421
    assert ask("/status", host=host, authorization=f"Bearer {TOKEN}") == 200, "behind a proxy"


@pytest.mark.parametrize(("bound", "host"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_the_page_answers_at_the_address_that_it_was_given(bound: str, host: str) -> None:
    assert ask("/", token="", bound=bound, host=host) == 200


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
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="token"):
        open_page(Config(http="127.0.0.1:0", http_token_file=str(path)))


def test_a_token_file_that_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, why in (("nowhere", "nowhere: No such file"), ("fifo", "no file")):
        with pytest.raises(ConfigError, match=why):
            open_page(Config(http="127.0.0.1:0", http_token_file=str(tmp_path / name)))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
def test_a_token_file_that_others_can_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    path = file_with(tmp_path / "token", TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_page(Config(http="127.0.0.1:0", http_token_file=str(path)))
    path.chmod(0o640)  # of a group, as root gives it to a daemon's user
    page = open_page(Config(http="127.0.0.1:0", http_token_file=str(path)))
    assert page is not None
    page.close()


def test_a_token_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path / "token", TOKEN)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="another user"):
        open_page(Config(http="127.0.0.1:0", http_token_file=str(path)))


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path / "token", f"{TOKEN}\n")
    path.chmod(0o600)
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
