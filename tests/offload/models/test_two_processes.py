"""Two pipelines, each in a process of its own, on a device that has room for one."""

from collections.abc import Callable

from tests.guarantees.harness import Daemon
from tests.processes import line_of, start_python, tell

ROUNDS = 3
PROGRAM = "from tests.offload.models.painter import main; import sys; main(*sys.argv[1:3], {})"

#: Takes longer than all the rest, and is the same for both.
IMPORTED = (
    "torch",
    "tests.offload.models.painter",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.wan.pipeline_wan",
)


def test_two_pipelines_share_one_device(device: Callable[[int], Daemon]) -> None:
    daemon = device(30)
    program = PROGRAM.format(ROUNDS)
    with (
        start_python(program, "flux", daemon.folder, imported=IMPORTED) as flux,
        start_python(program, "wan", daemon.folder, imported=IMPORTED) as wan,
    ):
        for painter in (flux, wan):
            assert line_of(painter) == "ready\n"
        for painter in (flux, wan):
            tell(painter, "go")
        for painter in (flux, wan):
            assert painter.stdout is not None
            assert [painter.stdout.readline() for _ in range(ROUNDS)] == ["same\n"] * ROUNDS
        # before they end: their components end with them
        status = daemon.status()
        assert [painter.wait() for painter in (flux, wan)] == [0, 0]
    assert status.evictions > 2 * ROUNDS
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes
