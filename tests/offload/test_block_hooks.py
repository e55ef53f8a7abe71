"""Hooks of blocks are removed during passes that hold all of it, and present in all others."""

from typing import Any

import torch
from torch import nn

from swapd_client.offload.shortcuts import BlockHooks, Pair, _compile_begins, _compile_ends


def block(seen: list[str]) -> nn.Module:
    """A module with hooks of its user."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda m, a: seen.append("user's before"))
    module.register_forward_hook(lambda m, a, o: seen.append("user's after"))
    return module


def hooked(seen: list[str], module: nn.Module | None = None) -> tuple[nn.Module, BlockHooks, Pair]:
    aside = BlockHooks()
    module = module or block(seen)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: object) -> None:
        seen.append("enter")
        pair.have_leave()  # as a call that acquires

    pair = Pair(module, enter, lambda m, a, o: seen.append("leave"))
    aside.add(pair)
    return module, aside, pair


def test_a_pass_that_holds_everything_calls_no_hook_and_the_next_one_does_in_its_place() -> None:
    seen: list[str] = []
    module, aside, _ = hooked(seen)
    aside.begin(whole=True)
    module(torch.ones(1))
    assert seen == ["user's before", "user's after"]
    aside.end(whole=True)
    seen.clear()
    module(torch.ones(1))
    assert seen == ["enter", "user's before", "user's after", "leave"]


def test_hooks_stay_while_any_thread_goes_block_by_block() -> None:
    seen: list[str] = []
    module, aside, _ = hooked(seen)
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
    module, aside, pair = hooked(seen)
    aside.begin(whole=True)
    pair.remove()
    aside.end(whole=True)
    module(torch.ones(1))
    assert seen == ["user's before", "user's after"]
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    assert not module._forward_hooks_always_called


def test_what_is_compiled_while_hooks_are_aside_calls_them_all_the_same() -> None:
    """Compiled code does not look for hooks again."""
    torch.compiler.reset()  # it also drops callbacks of compilations
    seen: list[str] = []
    module, aside, _ = hooked(seen, nn.ReLU())
    compiled: Any = torch.compile(nn.Sequential(module), backend="eager")
    aside.begin(whole=True)
    compiled(torch.ones(1))
    assert not module._forward_pre_hooks, "aside again"
    aside.end(whole=True)
    seen.clear()
    compiled(torch.ones(1))
    assert seen == ["enter", "leave"]
    torch.compiler.reset()


def test_compilations_begin_within_others() -> None:
    module, aside, _ = hooked([], nn.Identity())
    aside.begin(whole=True)
    for _ in range(2):
        _compile_begins()
    _compile_ends()
    assert module._forward_hooks
    for _ in range(2):  # once more than began: one may have registered in between
        _compile_ends()
    assert not module._forward_hooks
