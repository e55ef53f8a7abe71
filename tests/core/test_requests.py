"""Errors of a request by itself; and its times and sizes."""

import math
from typing import get_args

import pytest

from swapd.core.requests import content, deadline, problem_with
from swapd.shared.protocol import (
    NAME_MAX_CHARS,
    NAMES_MAX,
    RANGES_MAX,
    SEGMENTS_MAX,
    Acquire,
    AcquireStart,
    AcquireWorkspace,
    AnyOrder,
    AnyRequest,
    Cancel,
    Commit,
    EvictNow,
    Follows,
    ForecastRequest,
    Forget,
    GiveUp,
    Pin,
    Prefetch,
    Register,
    Release,
    Resize,
    StatusRequest,
    Unregister,
    Update,
    UsedRanges,
)

GOOD: list[AnyRequest] = [
    Acquire(1, ("a", "b"), timeout_s=math.inf),
    Acquire(1, ("a",), timeout_s=0.0),
    AcquireWorkspace(1, 1),
    AcquireStart(1),
    Cancel(1, 2),
    Commit(1, "a", ("b",)),
    ForecastRequest(1, ("a",)),
    ForecastRequest(1, (), acquire=2),
    Forget(1),
    Forget(1, ("files:0a", "a")),
    GiveUp(1, "a", 2),
    EvictNow(1, "a"),
    Pin(1, "a"),
    Pin(1, "a", unpin=True),
    Prefetch(1, ("a",)),
    Prefetch(1, ("a",), over=()),
    Prefetch(1, ("a",), over=("b",)),
    Follows(1, ("b",), "a"),
    Follows(1, (), "a"),
    Register(1, "a", 0),
    Register(1, "a", 5, segments=(2, 5), part_of="f", transient=True),
    Register(1, "a", 5, policy="alternating", group="g", content="c", layout="l"),
    Register(1, "a", 5, content="c", certain=True),
    Register(1, "a", 5, mutable=True, scratch="dropped"),
    Register(1, "a", 5, mutable=True, scratch="saved", part_of="f", transient=True),
    Register(1, "a", 5, mutable=True, scratch="saved", filled=True),
    Release(1, 2),
    Release(1, 2, used=(UsedRanges("a", 1, ()), UsedRanges("b", 1, ((0, 2), (2, 1), (4, 1))))),
    Release(1, 2, used=(UsedRanges("a", 1, tuple((2 * i, 1) for i in range(RANGES_MAX))),)),
    Resize(1, "a", 0),
    Resize(1, "a"),
    StatusRequest(1),
    Unregister(1, "a"),
    Update(1, "a"),
]

LONG = "x" * (NAME_MAX_CHARS + 1)

BAD: list[tuple[AnyRequest, str]] = [
    (Acquire(1, ()), "name at least one"),
    (Prefetch(1, ()), "name at least one"),
    (Prefetch(1, ("a",), over=("",)), "is no name"),
    (Follows(1, ("a",), ""), "is no name"),
    (Follows(1, ("b", "a"), "a"), "cannot follow itself"),
    (Follows(1, ("b",) * 65, "a"), "at most 64 may follow"),
    (ForecastRequest(1, ("a",) * (NAMES_MAX + 1)), "more than"),
    (ForecastRequest(1, ("a",), acquire=2), "takes no names"),
    (Acquire(1, ("",)), "is no name"),
    (Acquire(1, ("a\nb",)), "is no name"),
    (Acquire(1, ("a",), timeout_s=-1.0), "must be at least 0"),
    (Acquire(1, ("a",), timeout_s=math.nan), "must be at least 0"),
    (AcquireWorkspace(1, 0), "is no size of a workspace"),
    (AcquireWorkspace(1, 1, timeout_s=-1.0), "must be at least 0"),
    (AcquireStart(1, timeout_s=-1.0), "must be at least 0"),
    (Commit(1, "a", (LONG,)), "is no name"),
    (Update(1, ""), "is no name"),
    (GiveUp(1, "", 2), "is no name"),
    (Unregister(1, ""), "is no name"),
    (Pin(1, ""), "is no name"),
    (EvictNow(1, "a\nb"), "is no name"),
    (Forget(1, ("",)), "is no name"),
    (Resize(1, ""), "is no name"),
    (Resize(1, "a", -1), "is no size"),
    (Register(1, LONG, 1), "is no name"),
    (Register(1, "a", 1, part_of="\n"), "is no name"),
    (Register(1, "a", -1), "is no size"),
    (Register(1, "a", 1 << 60), "is no size"),
    (Register(1, "a", 5, segments=(5, 2)), "rising offsets"),
    (Register(1, "a", 5, segments=(2, 4)), "rising offsets"),
    (Register(1, "a", 0, segments=(0,) * (SEGMENTS_MAX + 1)), "at most"),
    (Register(1, "workspace 1.1", 1), "for workspaces"),
    (Register(1, "a", 1, part_of="workspace 1.1"), "for workspaces"),
    (Register(1, "a", 1, part_of="a"), "part of itself"),
    (Register(1, "a", 1, policy="alternating"), "needs group"),
    (Register(1, "a", 1, group="g"), "needs group"),
    (Register(1, "a", 1, content="c", mutable=True), "give no content"),
    (Register(1, "a", 1, content="\n"), "content"),
    (Register(1, "a", 1, layout="\n"), "layout"),
    (Register(1, "a", 1, certain=True), "no other bytes have this content"),
    (Register(1, "a", 1, transient=True), "only a part of a family"),
    (Register(1, "a", 1, scratch="saved"), "mutable=True, and no content"),
    (Register(1, "a", 1, scratch="dropped"), "mutable=True, and no content"),
    (Register(1, "a", 1, content="c", mutable=True, scratch="saved"), "give no content"),
    (Register(1, "a", 1, segments=(1,), mutable=True, scratch="saved"), "give no segments"),
    (Register(1, "a", 1, filled=True), 'is for scratch that is "saved"'),
    (Register(1, "a", 1, mutable=True, scratch="dropped", filled=True), "filled=True is for"),
    (Release(1, 2, used=(UsedRanges("a\nb", 1, ()),)), "is no name"),
    (Release(1, 2, used=(UsedRanges("a", 1, ()),) * (NAMES_MAX + 1)), "more than 1024 names"),
    (
        Release(1, 2, used=(UsedRanges("a", 1, ()), UsedRanges("b", 1, ((0, 0),)))),
        "ranges of 'b' must be",
    ),
    (Release(1, 2, used=(UsedRanges("a", 1, ((0, 2), (1, 1))),)), "ascending, apart, not empty"),
    (Release(1, 2, used=(UsedRanges("a", 1, ((3, 1), (0, 1))),)), "ascending, apart, not empty"),
    (Release(1, 2, used=(UsedRanges("a", 1, ((0, 1 << 60),)),)), "must be (offset, bytes)"),
    (Release(1, 2, used=(UsedRanges("a", 1, ((0, 1),) * (RANGES_MAX + 1)),)), "at most"),
]


@pytest.mark.parametrize("request_", GOOD, ids=repr)
def test_what_is_right_is_left_alone(request_: AnyRequest) -> None:
    assert problem_with(request_) is None


@pytest.mark.parametrize(("request_", "why"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said(request_: AnyRequest, why: str) -> None:
    assert why in (problem_with(request_) or "")


def test_every_request_is_looked_at() -> None:
    assert {type(request) for request in GOOD} == {
        *get_args(AnyOrder),
        ForecastRequest,
        StatusRequest,
    }


def test_a_timeout_runs_from_when_it_came_and_one_of_years_never_ends() -> None:
    assert deadline(2.5, 10.0) == 12.5
    assert deadline(0.0, 10.0) == 10.0
    assert deadline(None, 10.0) is None
    assert deadline(math.inf, 10.0) is None


def test_bytes_are_shared_by_those_that_are_laid_out_alike() -> None:
    one = content(Register(1, "a", 5, content="c", layout="l"))
    assert one == content(Register(2, "b", 5, content="c", layout="l"))
    assert one != content(Register(1, "a", 5, content="c", layout="m"))
    assert content(Register(1, "a", 5, layout="l")) == ""
