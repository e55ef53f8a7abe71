"""A module that gets other memory leaves its component: that is said, once, where it happens."""

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from swapd import spawn
from swapd_client import Client, connect


@pytest.fixture
def client() -> Iterator[Client]:
    with spawn.daemon(budget="16MiB") as daemon, connect(daemon.folder) as client:
        yield client


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def assign(module: nn.Sequential) -> None:
    module.load_state_dict(model().state_dict(), assign=True)


def replace(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(8, 8))


LEAVES: list[Callable[[nn.Sequential], object]] = [
    nn.Sequential.half,
    lambda module: module.to(torch.bfloat16),
    nn.Sequential.double,
    lambda module: module[0].half(),
    assign,
    replace,
]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("family", [False, True])
def test_it_is_said_at_the_line_where_it_happens(
    client: Client, leave: Callable[[nn.Sequential], object], family: bool
) -> None:
    module = model()
    if family:
        client.register_family("f", {"a": module})
    else:
        client.register("a", module)
    with (
        client.acquire("f" if family else "a"),
        pytest.warns(UserWarning, match="has left") as said,
    ):
        leave(module)
    (one,) = said
    assert "'0.weight' has left component" in str(one.message)
    assert one.filename == __file__


def test_after_its_remedy_it_is_a_component_again(client: Client) -> None:
    module = model()
    client.register("a", module)
    with client.acquire("a"), pytest.warns(UserWarning, match=r"client.unregister\('a'\)"):
        module.half()
    client.unregister("a")
    values = [p.clone() for p in module.parameters()]
    component = client.register("a", module)
    with client.acquire("a"):
        assert all(map(torch.equal, values, module.parameters()))
        assert next(module.parameters()).data_ptr() >= component.address


def keep_their_dtype(client: Client, module: nn.Sequential) -> None:
    with client.acquire("a"):
        module.float().to("cpu").requires_grad_(False).eval()


def delete_a_part(client: Client, module: nn.Sequential) -> None:
    del module[1]
    module[0].register_parameter("bias", None)


def unregister_first(client: Client, module: nn.Sequential) -> None:
    client.unregister("a")
    module.half()


def close_first(client: Client, module: nn.Sequential) -> None:
    client.close()
    module.half()


@pytest.mark.parametrize("do", [keep_their_dtype, delete_a_part, unregister_first, close_first])
def test_nothing_is_said_of_what_leaves_no_component(
    client: Client, do: Callable[[Client, nn.Sequential], None]
) -> None:
    module = model()
    module.__dict__["ring"] = module  # only a collection of garbage finds it
    client.register("a", module)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        do(client, module)
        del module
        gc.collect()
    assert not [one for one in said if issubclass(one.category, UserWarning)]
