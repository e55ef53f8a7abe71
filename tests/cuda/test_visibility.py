"""Which GPU a worker means, and what it is told when it cannot use it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, PROGRAM, World
from tests.guarantees import harness
from tests.processes import output_of, run_python

USE = """
import sys, swapd_client
with swapd_client.connect(sys.argv[1]) as client:
    part = client.register("mine", {"data": b"x" * (1 << 20)})
    with client.acquire("mine") as lease:
        print(client.session.processor.index, part.address > 0)
"""


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, **knobs: object) -> Iterator[World]:
    with fakecuda.machine(total=64 * MIB, **knobs) as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        with harness.world(PROGRAM) as made:
            yield World(made, fake)
        assert [fake.held_bytes(gpu) for gpu in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("visible", "index"), [("0,1", 1), ("1,0", 0), ("1", 0), (None, 1)], ids=str
)
def test_the_same_card_whatever_its_index(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int
) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon(device="cuda:1")
        env = dict(world.fake.environment())
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        assert output_of(USE, daemon.folder, env=env) == f"{index} True\n"
        assert world.fake.held_bytes(0) == 0


def failure(world: World, folder: object, **env: str) -> str:
    done = run_python(USE, folder, env={**world.fake.environment(), **env})
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_card_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon(device="cuda:1")
        said = failure(world, daemon.folder, CUDA_VISIBLE_DEVICES="0")
    assert "DeviceUnavailable: swapd serves cuda:1 (GPU-" in said
    assert "does not see the GPU" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_without_a_driver_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        said = failure(world, daemon.folder, LD_LIBRARY_PATH="/nowhere")
    assert "DeviceUnavailable: swapd serves cuda:0" in said
    assert "no NVIDIA driver here" in said
    assert "--gpus all" in said


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        hide = "import sys; sys.modules['cuda.bindings.driver'] = None"
        done = run_python(hide + USE, daemon.folder, env=world.fake.environment())
    assert "pip install 'swapd[cuda]'" in done.stderr.splitlines()[-1]


FORKS = """
import os, sys, swapd_client
from cuda.bindings import driver
client = swapd_client.connect(sys.argv[1])
def child():
    pid = os.fork()
    if not pid:
        with swapd_client.connect(sys.argv[1]) as mine:
            mine.register(f"by {os.getpid()}", {"data": b"x" * (1 << 20)})
            with mine.acquire(f"by {os.getpid()}"):
                os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert child() == 7, "nothing of CUDA was touched, so a child can use it"
client.register("mine", {"data": b"x" * (1 << 20)})
lease = client.acquire("mine")
pid = os.fork()
if not pid:
    for use in (lease.release, lambda: client.acquire("mine"), lambda: client.unregister("mine")):
        try:
            use()
        except swapd_client.ForkedClient:
            pass
        else:
            os._exit(1)
    client.close()
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
lease.release()
client.close()
"""


def test_a_process_may_connect_and_then_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch) as world:
        daemon = world.daemon()
        output_of(FORKS, daemon.folder, env=world.fake.environment())


def test_the_context_that_was_current_still_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cards, the process works on the other one all the time."""
    program = """
        import sys, swapd_client
        from cuda.bindings import driver as d
        d.cuInit(0)
        other = d.cuDevicePrimaryCtxRetain(1)[1]
        d.cuCtxSetCurrent(other)
        def same():
            return int(d.cuCtxGetCurrent()[1]) == int(other)
        client = swapd_client.connect(sys.argv[1])
        client.register("mine", {"data": b"x" * (1 << 20)})
        assert same()
        for _ in range(3):
            with client.acquire("mine") as lease:
                assert same()
                lease.wait(stream=0)
        assert same()
        client.unregister("mine")
        client.close()
        assert same()
    """
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        output_of(program, daemon.folder, env=world.fake.environment())
