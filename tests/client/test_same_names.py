"""Both clients have the same names, which take the same arguments."""

import inspect

import pytest

import swapd_client


def names(kind: type) -> dict[str, list[inspect.Parameter]]:
    """Public methods, and their arguments."""
    return {
        name: list(inspect.signature(method).parameters.values())
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


SYNC, AWAITED = names(swapd_client.Client), names(swapd_client.AsyncClient)


def test_there_are_the_same() -> None:
    assert SYNC.keys() == AWAITED.keys()


@pytest.mark.parametrize("name", SYNC)
def test_they_take_the_same(name: str) -> None:
    assert SYNC[name] == AWAITED[name]


def test_what_is_not_awaited_on_the_loop_is_the_call_of_the_other_client() -> None:
    for name in SYNC:
        call = getattr(swapd_client.AsyncClient, name)
        if inspect.unwrap(call) is not call:
            assert inspect.unwrap(call) is getattr(swapd_client.Client, name)


def test_leases_have_the_same() -> None:
    assert names(swapd_client.Lease).keys() == names(swapd_client.AsyncLease).keys()
