"""Hooks of blocks are out of the way of passes that hold everything, and there for all others."""

from typing import Any

import torch
from torch import nn

from swapd_client.offload.aside import Aside, Pair


def block(seen: list[str]) -> nn.Module:
    """A module whose user has hooks of their own around it."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda m, a: seen.append("user's before"))
    module.register_forward_hook(lambda m, a, o: seen.append("user's after"))
    return module


class Entering:
    """The pre-hook of a block, as `hooks.Enter` is."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.pair: Pair | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.seen.append("enter")
        if self.pair is not None:
            self.pair.have_leave()


def hooked(seen: list[str]) -> tuple[nn.Module, Aside]:
    module, aside = block(seen), Aside()
    aside.add(Pair(module, Entering(seen), lambda m, a, o: seen.append("leave")))
    return module, aside


def test_a_pass_that_holds_everything_calls_no_hook_and_the_next_one_does_in_its_place() -> None:
    seen: list[str] = []
    module, aside = hooked(seen)
    aside.begin(whole=True)
    module(torch.ones(1))
    assert seen == ["user's before", "user's after"]
    aside.end(whole=True)
    seen.clear()
    module(torch.ones(1))
    assert seen == ["enter", "user's before", "user's after", "leave"]


def test_hooks_stay_while_any_thread_goes_block_by_block() -> None:
    seen: list[str] = []
    module, aside = hooked(seen)
    aside.begin(whole=False)
    aside.begin(whole=True)
    module(torch.ones(1))
    assert "enter" in seen
    aside.end(whole=False)
    seen.clear()
    module(torch.ones(1))
    assert "enter" not in seen
    aside.begin(whole=False)
    module(torch.ones(1))
    assert "enter" in seen


def test_what_was_removed_while_aside_does_not_come_back() -> None:
    seen: list[str] = []
    module, aside = hooked(seen)
    aside.begin(whole=True)
    aside.pairs[0].remove()
    aside.end(whole=True)
    module(torch.ones(1))
    assert seen == ["user's before", "user's after"]
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    assert not module._forward_hooks_always_called
