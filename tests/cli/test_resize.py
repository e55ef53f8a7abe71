"""`swapd resize`, and the line of `swapd status` for a component in parts."""

import json
import re
from typing import Any

import swapd_client

from .conftest import MIB, Running, on_terminal, swapd


def register(daemon: Running, **options: Any) -> swapd_client.Client:
    """A worker with `dit`: four blocks of 2 MiB, and a part for the rest."""
    client = swapd_client.connect(daemon.folder, label="worker")
    parts = {name: {"w": bytes(2 * MIB)} for name in ("rest", "0", "1", "2", "3")}
    client.register_family("dit", parts, **options)
    return client


def line(text: str, start: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(start))


def test_more_or_less_of_it_is_kept(daemon: Running) -> None:
    with register(daemon):
        shown = swapd("resize", "dit", "6MiB", "-e", daemon.folder).stdout
        assert shown == "dit: 3 of 5 parts kept, 6 MiB of 10 MiB\n"
        shown = swapd("resize", "dit", "auto", "-e", daemon.folder).stdout
        assert shown == "dit: 5 of 5 parts kept, 10 MiB of 10 MiB\n"


def test_status_tells_of_the_parts_as_one(daemon: Running) -> None:
    with register(daemon, resident="6MiB") as client:
        with client.acquire("dit"):
            row = line(swapd("status", "-e", daemon.folder).stdout, "dit")
            assert "10 MiB of 10 MiB  5 parts, 5 in  lru" in row
            assert "5: worker (session 1)" in row
        text = swapd("status", "-e", daemon.folder).stdout
        row = line(text, "dit")
        assert "6 MiB of 10 MiB  5 parts, 3 in  lru" in row
        assert re.search(r" 5/2 +0 +\d+ ", row), "in and out, and none of it wasted"
        assert "dit/0" not in text


def test_status_tells_of_each_part_if_it_is_asked_to(daemon: Running) -> None:
    with register(daemon, resident="6MiB"):
        text = swapd("status", "--parts", "-e", daemon.folder).stdout
        assert "sequential" in line(text, "dit/0")
        assert "lru" in line(text, "dit/1")
        reply = json.loads(swapd("status", "--json", "-e", daemon.folder).stdout)
        assert [c["part_of"] for c in reply["components"]] == ["dit"] * 5


def test_components_that_only_belong_together_are_told_one_by_one(daemon: Running) -> None:
    with swapd_client.connect(daemon.folder) as client:
        for name in ("text_encoder", "image_encoder"):
            client.register(name, {"w": bytes(MIB)}, part_of="encoders")
        text = swapd("status", "-e", daemon.folder).stdout
        assert line(text, "text_encoder")
        assert line(text, "image_encoder")


def test_what_cannot_be_resized_is_said_in_one_line(daemon: Running) -> None:
    with register(daemon) as client:
        client.register("vae", {"w": b"0"})
        done = swapd("resize", "vae", "1MiB", "-e", daemon.folder, status=1)
        assert "'vae' was registered whole" in done.stderr
        done = swapd("resize", "dti", "1MiB", "-e", daemon.folder, status=1)
        assert "did you mean 'dit'?" in done.stderr
        done = swapd("resize", "dit", "much", "-e", daemon.folder, status=2)
        assert "'much' is not a size" in done.stderr


def test_the_log_says_who_resized_what(daemon: Running) -> None:
    with register(daemon) as client:
        client.acquire("dit").release()
        swapd("resize", "dit", "6MiB", "-e", daemon.folder)
        client.acquire("dit").release()
        log = on_terminal("log", "-e", daemon.folder)
        assert "keep 6 MiB; by swapd resize" in log
        assert "not kept any more" in log


def test_the_story_of_what_has_parts_is_that_of_all_of_them(daemon: Running) -> None:
    with register(daemon, resident="6MiB") as client:
        client.acquire("dit").release()
        whole = swapd("log", "dit", "-e", daemon.folder).stdout
        assert "in 5x, out 2x" in line(whole, "dit: ")
        assert "evict dit/0" in whole
        part = swapd("log", "dit/0", "-e", daemon.folder).stdout
        assert "in 1x, out 1x" in line(part, "dit/0: ")
        assert "ask dit by worker" in part
        assert "dit/1" not in part
