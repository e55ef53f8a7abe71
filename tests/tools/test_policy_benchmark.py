"""`benchmarks.policy`: the order of service of the core, on a trace of many models."""

import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.policy.__main__ import main, read, serve
from benchmarks.policy.clients import Asking, Request, Served
from swapd.core.records import Rules

#: More work than the device can do while it loads a model for each request.
LOAD_S = 8.0
RNG = random.Random(7)
TRACE = [
    Request(float(at), f"model-{RNG.choices(range(8), [1 / (i + 1) for i in range(8)])[0]}", 20.0)
    for at in sorted(RNG.sample(range(5000), 250))
]


def mean_s(served: Served) -> float:
    return sum(served.waited_s) / len(served.waited_s)


@pytest.mark.parametrize("asks", ["one", "at once"])
def test_fewer_loads_and_shorter_waits_than_first_come_first_served(asks: Asking) -> None:
    first_come = serve(TRACE, 1, LOAD_S, "in order", Rules(overtake=0))
    assert first_come.place == sorted(first_come.place)
    served = serve(TRACE, 1, LOAD_S, asks, Rules())
    assert served.loads < 0.5 * first_come.loads
    assert mean_s(served) < mean_s(first_come)
    assert 0 < served.overtaken <= Rules().overtake


def test_where_a_load_is_short_beside_a_use_requests_are_served_as_they_come() -> None:
    served = serve(TRACE, 1, 0.1, "one", Rules())
    assert served.place == sorted(served.place)


def test_a_trace_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.csv"
    lines = [f"{r.arrives_s},{r.model},{r.exec_s},more" for r in TRACE]
    file.write_text("\n".join(["t_s,model,exec_s,group", *lines]))
    assert read(file) == TRACE
    picture = tmp_path / "frontier.svg"
    how = ["--room", "1", "--load", "8", "--overtake", "4", "--picture", str(picture)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["policy", str(file), *how])
        assert main() == 0
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{*}circle")) == 2 * 3, "two settings, of two bounds and a key"
    capsys.readouterr()
    file.write_text("\n".join(["t_s,model", "1,a"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["policy", str(file)])
        assert main() == 2
    assert "is no trace with t_s, model and exec_s" in capsys.readouterr().err
