"""The page of the core names all of its modules."""

from pathlib import Path
from typing import get_args

import pytest

import swapd.core
from swapd.core import planner
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.shared.protocol import AnyOrder

README = (Path(swapd.core.__file__).parent / "README.md").read_text()
MAP = (Path(swapd.core.__file__).parents[2] / "docs" / "map.md").read_text()


@pytest.mark.parametrize("event", get_args(AnyEvent), ids=lambda cls: cls.__name__)
def test_every_event_is_named(event: type) -> None:
    assert f"`{event.__name__}`" in README


@pytest.mark.parametrize("request_", get_args(AnyOrder), ids=lambda cls: cls.__name__)
def test_every_request_is_named(request_: type) -> None:
    assert f"`{request_.__name__}`" in README


@pytest.mark.parametrize("action", get_args(AnyAction), ids=lambda cls: cls.__name__)
def test_every_action_is_named(action: type) -> None:
    assert f"`{action.__name__}`" in README


def test_the_page_says_where_eviction_is_decided() -> None:
    for page in (README, MAP):
        assert "planner.make_room" in page
        assert "policy.py" in page
    assert callable(planner.Planner.make_room)
    assert "make_room" in (planner.__doc__ or "")


def test_every_file_of_the_core_is_named() -> None:
    for path in Path(swapd.core.__file__).parent.glob("*.py"):
        assert path.name == "__init__.py" or f"`{path.name}`" in README
