"""Ray actors that share a GPU share a daemon: a real local cluster, on the host device."""

import os
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

import swapd
from deploy.ray.share import connect

MIB = 1 << 20
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@ray.remote(num_gpus=0.5, num_cpus=0)
class Stage:
    """A stage with a component of 6 MiB on a GPU with a budget of 8 MiB."""

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._client = connect(name, budget="8MiB", device="host", where=where)
        self._component = self._client.register(name, {"w": bytearray([ord(name[0])]) * (6 * MIB)})

    def gpu(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]  # noqa: TID251

    def sessions(self) -> list[str]:
        return [s.label for s in self._client.status().sessions]

    def folder(self) -> str:
        return str(self._client.session.endpoint)

    def run(self) -> int:
        with self._client.acquire(self._name, timeout=60):
            return int(self._component.view("w")[0])

    def evictions(self) -> int:
        return self._client.status().evictions

    def close(self) -> None:
        self._client.close()


ACTOR: Any = Stage  # an actor class, which type checkers do not see


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWAPD_LINGER", "1")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else ray writes a token into the home folder
        ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def where(cluster: None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sw-") as made:
        yield made


def get(*calls: Any) -> list[Any]:
    return list(ray.get(list(calls), timeout=100))


def test_actors_of_one_gpu_share_its_daemon_and_take_turns(where: str) -> None:
    stages = [ACTOR.remote(name, where) for name in ("a", "b", "c", "d")]
    gpus = get(*(s.gpu.remote() for s in stages))
    folders = get(*(s.folder.remote() for s in stages))
    sessions = get(*(s.sessions.remote() for s in stages))
    assert sorted(gpus) == ["0", "0", "1", "1"]
    assert folders == [f"{where}/gpu{gpu}" for gpu in gpus]
    assert all(len(labels) == 2 for labels in sessions)
    for _ in range(3):
        assert get(*(s.run.remote() for s in stages)) == [ord(n) for n in "abcd"]
    assert all(n > 0 for n in get(*(s.evictions.remote() for s in stages)))
    get(*(s.close.remote() for s in stages))


def test_a_daemon_outlives_the_actor_that_started_it(where: str) -> None:
    first = ACTOR.remote("first", where)
    (folder,) = get(first.folder.remote())  # the actor has started the daemon
    others = [ACTOR.remote(name, where) for name in ("x", "y", "z")]
    found = get(*(other.folder.remote() for other in others))
    beside = others[found.index(folder)]
    (value,) = get(beside.run.remote())
    ray.kill(first)
    assert get(beside.run.remote()) == [value]
    assert len(get(beside.sessions.remote())[0]) <= 2
    get(*(other.close.remote() for other in others))


def test_the_example_shares_a_device_between_two_actors(
    cluster: None, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / "ray_actors.py"))["main"](f"{where}/host")
    said = capfd.readouterr().out
    assert re.fullmatch(r"(answer of 2048 numbers\n){4}[1-9]\d* evictions\n", said), said


@pytest.fixture
def served(cluster: None) -> Iterator[None]:
    serve.start(proxy_location="Disabled")  # no port, which others may have
    yield
    serve.shutdown()


def test_replicas_of_two_deployments_share_a_device_and_one_that_is_killed_is_replaced(
    served: None, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with swapd.connect(f"{where}/host", device="host", start=True, budget="192MiB") as client:
        runpy.run_path(str(EXAMPLES / "ray_serve.py"))["main"](f"{where}/host")
        assert client.status().evictions > 0
    said = capfd.readouterr().out
    assert said.endswith("1 of 4 replicas is new; answers are alike: True\n"), said
