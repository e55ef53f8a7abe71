"""`attach` learns which component is called after which, and the daemon loads it ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import swapd_client
from swapd import spawn
from swapd.core import actions, events
from swapd.log import reader
from swapd.shared.protocol import Follows
from swapd_client import Client
from tests.lives import living
from tests.offload.modules import TOKENS, WIDTH, Model, seeded

IN_TURN = {("text_encoder", "transformer"), ("transformer", "vae"), ("vae", "text_encoder")}


@contextmanager
def attached(model: Model, swap_log: Path) -> Iterator[Client]:
    """With a daemon that has room for two of its three components."""
    with (
        spawn.daemon(budget="4MiB", swap_log=swap_log) as daemon,
        swapd_client.connect(daemon.folder) as client,
        client.attach(model),
        torch.no_grad(),
    ):
        yield client


def said(swap_log: Path) -> list[tuple[str, ...]]:
    """What follows what, as a daemon that has ended heard it."""
    done = [line.record.event for line in reader.read(swap_log)]
    asked = [event.request for event in done if isinstance(event, events.SessionRequest)]
    return [(one.after, *one.names) for one in asked if isinstance(one, Follows)]


def test_the_third_pass_finds_what_comes_next_on_its_way(tmp_path: Path) -> None:
    model, plain = seeded(Model), seeded(Model)
    with attached(model, tmp_path / "log"):
        for _ in range(5):
            assert torch.equal(model(TOKENS), plain(TOKENS))
    told = said(tmp_path / "log")
    assert (set(told), len(told)) == (IN_TURN, 3), "each once"
    done = [line.record.action for line in reader.read(tmp_path / "log")]
    came = [a for a in done if isinstance(a, actions.Foreseen) and a.saved_s]
    assert came, "nothing was loaded ahead"


def test_calls_in_another_order_each_time_are_no_order(tmp_path: Path) -> None:
    model = seeded(Model)
    hidden = torch.zeros(1, WIDTH)
    with attached(model, tmp_path / "log"):
        calls = {
            "e": lambda: model.text_encoder(TOKENS),
            "t": lambda: model.transformer(hidden),
            "v": lambda: model.vae.decode(hidden),
        }
        for step in "ttetvteevettvtev":
            calls[step]()
    assert said(tmp_path / "log") == []


def test_what_the_program_declares_stays(tmp_path: Path) -> None:
    model = seeded(Model)
    with attached(model, tmp_path / "log") as client:
        client.follows("vae", after="text_encoder")
        for _ in range(4):
            model(TOKENS)
    done = [line.record.action for line in reader.read(tmp_path / "log")]
    found = {(a.after, a.name) for a in done if isinstance(a, actions.Foresee)}
    assert ("text_encoder", "vae") in found
    assert ("text_encoder", "transformer") not in found


def test_the_next_daemon_hears_it_too(tmp_path: Path) -> None:
    model = seeded(Model)
    with living() as lives, lives.client.attach(model), torch.no_grad():
        for _ in range(3):
            model(TOKENS)
        lives.kill()
        lives.start(swap_log=tmp_path / "log")
        for _ in range(2):  # the first call joins it
            model(TOKENS)
    assert set(said(tmp_path / "log")) == IN_TURN
