"""The states of a component change as the table says, which is also the one on the page; what the
page names is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import swapd.core
from swapd.core.states import COMPONENT_CHANGES, WORKSPACE_CHANGES, State

PAGE = (Path(swapd.core.__file__).parent / "README.md").read_text()


@pytest.mark.parametrize("changes", [COMPONENT_CHANGES, WORKSPACE_CHANGES])
def test_the_page_has_the_table(changes: dict[tuple[State, State], str]) -> None:
    rows = [f"| {old} | {cause} | {new} |" for (old, new), cause in changes.items()]
    assert "\n".join(["| from | when | to |", "| --- | --- | --- |", *rows]) in PAGE


@pytest.mark.parametrize("changes", [COMPONENT_CHANGES, WORKSPACE_CHANGES])
def test_from_every_state_a_component_can_become_absent(
    changes: dict[tuple[State, State], str],
) -> None:
    leads = {State.ABSENT}
    for _ in changes:
        leads |= {old for old, new in changes if new in leads}
    assert leads == {state for change in changes for state in change}


def test_the_page_names_functions_that_are_there() -> None:
    named = set(re.findall(r"`([a-z_]+)\.([a-z_]+)`", PAGE)) - {("core", "py")}
    functions = {(module, name) for module, name in named if name != "py"}
    assert len(functions) > 5
    for module, name in functions:
        assert hasattr(import_module(f"swapd.core.{module}"), name), f"{module}.{name}"
