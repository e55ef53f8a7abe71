"""A second registration of a tensor is refused, with an error that names the first component.

Under strict isolation: a read of an absent component would end this process.
"""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapd_client
from swapd import spawn
from swapd_client import Client, InvalidSource
from tests import served
from tests.threads import run_together


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of the first layer."""
    return next(module.parameters())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def names(client: Client) -> list[str]:
    return [c.name for c in client.status().components]


def test_a_module_is_refused_under_a_second_name(client: Client) -> None:
    module = model()
    weight = weight_of(module).detach().clone()
    client.register("a", module)
    with pytest.raises(InvalidSource, match=r"'0\.weight' is in component 'a' already"):
        client.register("b", module)
    assert names(client) == ["a"]
    with client.acquire("a"):
        assert torch.equal(weight_of(module), weight)


def test_one_tensor_that_is_in_a_component_is_refused_among_others(client: Client) -> None:
    module = model()
    client.register("a", module)
    tied = {"new": torch.ones(8), "tied": weight_of(module[1])}
    with pytest.raises(InvalidSource, match="'tied' is in component 'a' already"):
        client.register("b", tied)
    assert tied["new"].tolist() == [1.0] * 8
    assert names(client) == ["a"]


def test_views_and_storages_of_what_is_in_a_component_are_refused(client: Client) -> None:
    module = model()
    client.register("a", module)
    weight = weight_of(module).detach()
    of_storage = torch.empty(0).set_(weight.untyped_storage(), 3, (2, 2), (2, 1))
    for view in (weight[3:5], weight.t(), weight.view(torch.uint8), of_storage):
        with pytest.raises(InvalidSource, match="component 'a'"):
            client.register("b", {"x": view})


def test_buffers_over_a_component_are_refused(client: Client) -> None:
    part = client.register("a", {"x": bytes(range(100))})
    written = client.register("m", {"x": bytes(100)}, mutable=True)
    for view, name in ((part.view("x"), "a"), (written.view("x")[10:20], "m")):
        with pytest.raises(InvalidSource, match=f"'y' is in component '{name}' already"):
            client.register("b", {"y": view})
    with client.acquire("a"):
        client.register("copy", {"y": bytes(part.view("x"))})


def test_a_family_refuses_what_is_in_a_component_and_a_component_what_is_in_a_family(
    client: Client,
) -> None:
    first, second = model(), model()
    client.register("a", first)
    with pytest.raises(InvalidSource, match="component 'a'"):
        client.register_family("f", {"0": second, "1": first})
    client.register_family("f", {"0": second[0], "1": second[1]})
    with pytest.raises(InvalidSource, match="component 'f/1'"):
        client.register("b", second[1])
    assert names(client) == ["a", "f/0", "f/1"]


def test_files_are_not_loaded_into_a_module_that_is_in_a_component(
    client: Client, tmp_path: Path
) -> None:
    module = model()
    save_file(dict(module.state_dict()), tmp_path / "model.safetensors")
    client.register("a", module)
    with pytest.raises(InvalidSource, match="component 'a'"):
        client.load("b", tmp_path, module)
    with pytest.raises(InvalidSource, match="component 'a'"):
        client.load_family("b", tmp_path, {"0": ["0"], "rest": []}, module)
    assert names(client) == ["a"]


def test_two_clients_of_one_process_do_not_take_each_others(
    client: Client, daemon: spawn.Spawned
) -> None:
    module = model()
    client.register("a", module)
    with swapd_client.connect(daemon.folder) as other:
        with pytest.raises(InvalidSource, match=r"component 'a' .* another client"):
            other.register("b", module)
        with pytest.raises(InvalidSource, match=r"component 'a' .* another client"):
            other.attach(module, ".")
        assert names(client) == ["a"]


def test_another_daemon_does_not_get_what_is_in_a_component_either(client: Client) -> None:
    module = model()
    client.register("a", module)
    with (
        served.alone(budget="64MiB", isolation="strict") as (_, other),
        pytest.raises(InvalidSource, match="component 'a'"),
    ):
        other.register("a", module)


def test_what_was_unregistered_or_closed_may_be_registered_under_any_name(
    client: Client, daemon: spawn.Spawned
) -> None:
    module = model()
    weight = weight_of(module).detach().clone()
    client.register("a", module)
    client.unregister("a")
    with swapd_client.connect(daemon.folder) as other:
        other.register("b", module)
        with pytest.raises(InvalidSource, match="component 'b'"):
            client.register("a", module)
    client.register("c", module)
    with client.acquire("c"):
        assert torch.equal(weight_of(module), weight)


def test_two_threads_that_register_one_module_do_not_both_move_it(client: Client) -> None:
    module = model()
    weight = weight_of(module).detach().clone()
    meet, outcome = threading.Barrier(8), []

    def register(name: str) -> None:
        meet.wait()
        try:
            client.register(name, module)
            outcome.append(name)
        except InvalidSource as exc:
            assert "component" in str(exc)  # noqa: PT017 - in a thread

    threads = [threading.Thread(target=register, args=(str(n),)) for n in range(8)]
    run_together(*threads)
    assert names(client) == outcome
    assert len(outcome) == 1
    with client.acquire(*outcome):
        assert torch.equal(weight_of(module), weight)


def test_an_update_from_what_no_lease_holds_is_refused_by_its_name(client: Client) -> None:
    old, new = model(), model()
    client.register("old", old)
    client.register("new", new)
    values = dict(new.state_dict(keep_vars=True))
    with pytest.raises(InvalidSource, match=r"'0\.weight' is in component 'new'"):
        client.update("old", values)
    with client.acquire("new"):
        client.update("old", values)
    client.unregister("new")
    client.update("old", values)
    part = client.register("bytes", {"x": b"1234"})
    with pytest.raises(InvalidSource, match="component 'bytes'"):
        client.update("bytes", {"x": part.view("x")})


def test_files_are_not_loaded_into_buffers_that_are_in_a_component(
    client: Client, tmp_path: Path
) -> None:
    """Loading writes buffers in place: a fault, if they are absent or read-only."""
    module = nn.BatchNorm1d(8)
    save_file(dict(module.state_dict()), tmp_path / "model.safetensors")
    assert module.running_mean is not None
    client.register("stats", {"mean": module.running_mean})
    with pytest.raises(InvalidSource, match=r"'running_mean' .*'stats'"):
        client.load("norm", tmp_path, module)
    client.unregister("stats")
    client.load("norm", tmp_path, module)
