"""`swapd plan`, as its users run it, with and without a running daemon."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swapd.cli.components import forecast_page as page
from swapd.cli.plan_input import status_of
from swapd.shared import protocol
from swapd.shared.protocol import Blocker, Forecast, Victim
from swapd_client import VersionMismatch
from tests import fakecuda
from tests.plan.test_sizes import layers, save
from tests.processes import output_of

from .conftest import MIB, Running, on_terminal, swapd

GIB = 1 << 30
CARD = ("--device-memory", "16GiB", "--bandwidth", "25GB/s")


def plan(*words: object) -> Any:
    return json.loads(swapd("plan", *words, "--json").stdout)


def refused(*words: object) -> str:
    return swapd("plan", *words, status=1).stderr


def by_name(report: Any) -> dict[str, Any]:
    return {p["name"]: p for p in report["placements"]}


# --- output ------------------------------------------------------------------------------


def test_the_example_of_a_7b_model_is_told_about_8_gib() -> None:
    report = plan("olmo=13.6GiB", *CARD, "--kv-cache", "6.9GiB", "--overhead", "2.4GiB")
    olmo = by_name(report)["olmo"]
    assert olmo["how"] == "stream"
    assert olmo["kept_bytes"] / GIB == pytest.approx(5.6, abs=0.2)
    (line,) = [ln for ln in report["stage_file"].splitlines() if "cpu_offload_gb" in ln]
    assert float(line.partition(":")[2]) == pytest.approx(8.0, abs=0.2)
    assert report["serve"].startswith("swapd serve --device cuda:0 --budget 6")
    assert report["bandwidth_from"] == "as given"


def test_people_are_told_the_sum_the_costs_and_what_to_paste() -> None:
    shown = on_terminal("plan", "dit=20GiB", "enc=9GiB", *CARD, "--kv-cache", "1GiB")
    assert "16 GiB - 1 GiB KV cache - 1.6 GiB overhead leaves 13.4 GiB for weights" in shown
    assert "copies at 25 GB/s: as given" in shown
    assert "a request moves" in shown
    assert "dit: taken to run 20 times a request; give --passes dit=N" in shown
    for pasted in ("stages:", "client.attach(model, [", "swapd serve --device"):
        assert pasted in shown


def test_what_fits_moves_nothing() -> None:
    assert plan("vae=1GiB", *CARD)["moved_bytes"] == 0
    assert "everything fits" in swapd("plan", "vae=1GiB", *CARD).stdout


def test_what_is_said_of_components_counts() -> None:
    more = ("--passes", "a=7", "--compute", "a=0.5", "--blocks", "a=16")
    a = by_name(plan("a=30GiB", *CARD, *more))["a"]
    assert (a["passes"], a["compute_known"]) == (7, True)
    assert a["step_s"] == pytest.approx((a["nbytes"] - a["kept_bytes"]) / 25e9 - 0.5)


def test_files_are_measured(tmp_path: Path) -> None:
    path = save(tmp_path / "dit.safetensors", **layers(8, 100 * MIB))
    dit = by_name(plan(path, *CARD))["dit"]
    assert (dit["nbytes"], dit["how"]) == (800 * MIB, "keep")


# --- refusals ----------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    said = refused("dit=60GiB", *CARD, "--kv-cache", "13GiB")
    assert "16 GiB - 13 GiB KV cache - 1.6 GiB overhead leaves 1.4 GiB for weights" in said
    assert "2 blocks of dit (3.75 GiB)" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dit=forty", *CARD), "dit=forty"),
        (("nowhere", *CARD), "nowhere does not exist"),
        (("dit=1GiB", "dit=2GiB", *CARD), "several components are called dit"),
        (("dit=1GiB", *CARD, "--passes", "dot=3"), "did you mean dit?"),
        (("dit=1GiB", *CARD, "--passes", "dit"), "write it like dit=20"),
        (("dit=1GiB", *CARD, "--blocks", "dit=0"), "more than 0"),
    ],
)
def test_what_makes_no_sense_is_named(words: tuple[str, ...], says: str) -> None:
    assert says in refused(*words)


def test_a_size_or_rate_that_is_none_is_named_with_its_option() -> None:
    for option in ("--kv-cache", "--bandwidth"):
        said = swapd("plan", "dit=1GiB", option, "much", status=2).stderr
        assert f"for '{option}': 'much' is not a size" in said


def test_without_a_daemon_it_must_be_told(tmp_path: Path) -> None:
    assert "or give files, folders" in refused("--endpoint", tmp_path)


def test_a_gpu_says_how_much_memory_it_has_and_how_fast_its_copies_are() -> None:
    program = "from swapd.cli import main\nimport sys\n"
    program += "sys.argv = ['swapd', 'plan', 'a=64MiB', '--device', 'cuda:0', '--json']\nmain()"
    with fakecuda.machine(total=512 * MIB) as fake:
        report = json.loads(output_of(program, env=fake.environment()))
    assert report["memory"]["total"] == 512 * MIB
    assert report["bandwidth_from"] == "measured here now, on cuda:0"
    assert report["serve"].startswith("swapd serve --device cuda:0")


def test_a_device_that_is_none_is_refused() -> None:
    assert "there is no device 'gpu7'" in refused("a=1GiB", "--device", "gpu7")


# --- with a running daemon ---------------------------------------------------------------


def test_a_daemon_says_what_there_is_and_how_fast_it_was(daemon: Running) -> None:
    client = daemon.client("worker", a=4, b=3)
    client.acquire("a").release()
    report = plan("--endpoint", daemon.folder)
    assert list(by_name(report)) == ["a", "b"]
    assert report["memory"]["total"] == 16 * MIB
    assert report["bandwidth_from"] == "measured by the daemon, in 1 swap-ins"
    assert report["serve"].startswith("swapd serve --device host")


def test_the_memory_of_a_daemon_is_not_taken_for_that_of_another_device(daemon: Running) -> None:
    program = "from swapd.cli import main\nimport sys\n"
    program += "sys.argv = ['swapd', 'plan', 'a=64MiB', '--device', 'cuda', '--json']\nmain()"
    with fakecuda.machine(total=512 * MIB) as fake:
        endpoint = {"SWAPD_ENDPOINT": str(daemon.folder)}
        report = json.loads(output_of(program, env={**fake.environment(), **endpoint}))
    assert report["memory"]["total"] == 512 * MIB
    assert report["serve"].startswith("swapd serve --device cuda:0 ")


def test_a_plan_that_needs_no_daemon_is_made_beside_one_of_another_version(
    daemon: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWAPD_ENDPOINT", str(daemon.folder))
    monkeypatch.setattr(protocol, "VERSION", protocol.OLDEST - 1)
    assert status_of(None, 60.0, needed=False) is None
    said = capsys.readouterr().err
    assert "swapd upgrade" in said
    assert "Planned without it" in said
    with pytest.raises(VersionMismatch):
        status_of(None, 60.0, needed=True)


def test_a_daemon_with_nothing_in_it_says_so(daemon: Running) -> None:
    assert "no components yet" in refused("--endpoint", daemon.folder)


def test_a_daemon_that_measured_nothing_has_it_measured_now(daemon: Running) -> None:
    daemon.client("worker", a=4)
    report = plan("--endpoint", daemon.folder)
    assert report["bandwidth_from"] == "measured here now, on host"
    assert report["bytes_per_s"] > 0


def test_acquire_says_what_it_would_do_now(daemon: Running) -> None:
    client = daemon.client("worker", a=10, b=10)
    client.acquire("a").release()
    reply = json.loads(swapd("forecast", "b", "--endpoint", daemon.folder, "--json").stdout)
    assert (reply["names"], reply["bytes_in"]) == (["b"], 10 * MIB)
    assert [v["name"] for v in reply["victims"]] == ["a"]
    assert reply["seconds"] > 0
    shown = swapd("forecast", "b", "--endpoint", daemon.folder).stdout
    assert "a (10 MiB)" in shown
    with client.acquire("a"):
        shown = swapd("forecast", "b", "--endpoint", daemon.folder).stdout
        assert "a: leased by worker" in shown
    said = swapd("forecast", "c", "--endpoint", daemon.folder, status=1).stderr
    assert "nobody has registered 'c'" in said


def forecast(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "id": 1,
        "names": ("a", "b"),
        "bytes_in": 3 * GIB,
        "bytes_coming": 0,
        "bytes_back": 0,
        "victims": (),
        "waits_for": (),
        "seconds": None,
        "bytes_per_s": None,
    }
    out = StringIO()
    Console(file=out, width=120).print(page(["a", "b"], Forecast(**{**fields, **changes})))
    return out.getvalue()


def test_a_forecast_reads_as_what_it_is() -> None:
    assert "not known yet: nothing was loaded" in forecast(
        unknown="not known yet: nothing was loaded"
    )
    assert "nothing: it is in" in forecast(bytes_in=0, seconds=0.0)
    evicts = (Victim("kv", GIB, 0, "room"),)
    assert "nothing: it comes in as zeros" in forecast(bytes_in=0, victims=evicts)
    assert "3 GiB, 1 GiB on the way already" in forecast(bytes_coming=GIB)
    victims = (Victim("m", GIB, GIB, "room"),)
    shown = forecast(victims=victims, bytes_back=GIB, seconds=0.5, bytes_per_s=6e9)
    assert "m (1 GiB)" in shown
    assert "in about 500 ms, with copies at the 6 GB/s measured" in shown
    parts = tuple(Victim(f"dit/{i}", GIB, 0, "room", "dit") for i in range(3))
    assert "dit (3 GiB in 3 parts)" in forecast(victims=parts)
    waits = forecast(waits_for=(Blocker("x", "leased by y"),), seconds=0.5)
    assert "x: leased by y" in waits
    assert "in about 500 ms" in waits
