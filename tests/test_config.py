"""A setting comes from its flag, else its variable, else its file, else its default."""

import pwd
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from swapd.cli import serve as serve_module
from swapd.cli.app import app_of
from swapd.daemon.daemon import RULES
from swapd.log.swap_log import place
from swapd.shared import config, runtime_dir
from swapd.shared import config as module
from swapd.shared.config import Config, ConfigError, default_folder, load
from tests.files import file_with

MIB = 1 << 20

#: For each setting: a text that is not its default, and its value.
SAMPLES: dict[str, tuple[str, Any]] = {
    "device": ("cuda:1", "cuda:1"),
    "budget": ("40GiB", 40 << 30),
    "chunk": ("64MiB", 64 << 20),
    "bandwidth": ("12GB/s", 12e9),
    "host_memory": ("100GB", 100 * 10**9),
    "keep_host": ("16GiB", 16 << 30),
    "pin_limit": ("0", 0),
    "runtime_dir": ("/run/elsewhere", "/run/elsewhere"),
    "isolation": ("strict", "strict"),
    "ack_timeout": ("0.5", 0.5),
    "residency_factor": ("0", 0.0),
    "residency_bound": ("1.25", 1.25),
    "patience": ("90", 90.0),
    "order": ("thinker, talker; encoder,dit,vae", "thinker, talker; encoder,dit,vae"),
    "overtake": ("3", 3),
    "overtake_of": ("talker=0, images=64", "talker=0, images=64"),
    "eviction": ("lru", "lru"),
    "turn": ("1m", 60.0),
    "stop_timeout": ("0", 0.0),
    "linger": ("0.5", 0.5),
    "swap_log": ("/var/log/swap-log.jsonl", "/var/log/swap-log.jsonl"),
    "swap_log_size": ("1MiB", 1 << 20),
    "swap_log_age": ("12h", 43200.0),
    "http": ("127.0.0.1:9470", "127.0.0.1:9470"),
    "http_token_file": ("/etc/swapd/http-token", "/etc/swapd/http-token"),
}
SETTINGS = Config.__struct_fields__


def toml(tmp_path: Path, text: str) -> Path:
    return file_with(tmp_path / "swapd.toml", text)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "SWAPD_" + name.upper()


def refusal(tmp_path: Path, *, file: str = "", env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load(toml(tmp_path, file) if file else None, {}, env or {})
    return str(refused.value)


# --- every setting, every way ------------------------------------------------------------


def test_there_is_a_sample_of_every_setting_and_none_is_its_default() -> None:
    assert set(SAMPLES) == set(SETTINGS)
    defaults = Config()
    assert not [name for name in SETTINGS if getattr(defaults, name) == SAMPLES[name][1]]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_a_line_of_the_file(name: str, tmp_path: Path) -> None:
    text, value = SAMPLES[name]
    expected = Config(**{name: value})
    assert load(toml(tmp_path, f'{name} = "{text}"'), {}, {}) == expected
    if not isinstance(value, str):
        assert load(toml(tmp_path, f"{name} = {value!r}"), {}, {}) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_a_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []
    monkeypatch.setattr(serve_module, "run", lambda config, *_: served.append(config))
    monkeypatch.setenv(module.CONFIG_VARIABLE, "")
    text, value = SAMPLES[name]
    done = CliRunner().invoke(app_of(), ["serve", flag(name), text])
    assert done.exit_code == 0, done.output
    assert served == [Config(**{name: value})]


def test_help_tells_every_flag_and_every_default() -> None:
    shown = CliRunner().invoke(app_of(), ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in SETTINGS:
        assert flag(name) in shown
    assert "(1GiB)" in shown
    assert "(relaxed)" in shown


# --- precedence --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(
    name: str, tmp_path: Path
) -> None:
    text, value = SAMPLES[name]
    others = {"isolation": "relaxed", "eviction": "next_use", "order": "b,a", "overtake_of": "b=1"}
    other = others.get(name, "host") if isinstance(value, str) else "7"
    environ = {variable(name): text}
    file = toml(tmp_path, f'{name} = "{other}"')
    assert getattr(load(file, {}, {}), name) != value
    assert getattr(load(file, {}, environ), name) == value
    environ = {variable(name): other}
    assert getattr(load(file, {name: text}, environ), name) == value
    assert load(None, {}, {}) == Config()


def test_the_file_is_named_by_flag_or_else_by_variable(tmp_path: Path) -> None:
    environ = {module.CONFIG_VARIABLE: str(toml(tmp_path, "patience = 1"))}
    assert load(None, {}, environ).patience == 1
    other = file_with(tmp_path / "other.toml", "patience = 2")
    assert load(other, {}, environ).patience == 2


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=-1", "a=1,b", "a=x", "a=1e3"])
def test_a_bound_on_overtaking_without_a_name_or_a_number_is_refused(
    text: str, tmp_path: Path
) -> None:
    assert "takes NAME=NUMBER" in refusal(tmp_path, file=f'overtake_of = "{text}"')


@pytest.mark.parametrize("order", ["a", "a,", "a,b;,c", ",".join("a" * 129)])
def test_an_order_without_a_second_name_or_with_too_many_is_refused(
    order: str, tmp_path: Path
) -> None:
    assert "order" in refusal(tmp_path, file=f'order = "{order}"')


# --- unknown -----------------------------------------------------------------------------


def test_an_unknown_key_in_the_file_is_refused_with_the_name_it_may_have_meant(
    tmp_path: Path,
) -> None:
    why = refusal(tmp_path, file="budjet = 5")
    assert why == f"{tmp_path}/swapd.toml: budjet is not a setting; did you mean budget?"


def test_what_resembles_nothing_gets_the_whole_list(tmp_path: Path) -> None:
    why = refusal(tmp_path, file="zzz = 1")
    assert all(name in why for name in SETTINGS)


def warning(caplog: pytest.LogCaptureFixture, environ: dict[str, str]) -> str:
    """The warning about variables without effect."""
    caplog.clear()
    assert load(None, {}, environ) == Config()
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "swapd.shared.config")
    return record.getMessage()


def test_a_variable_that_is_no_setting_is_named_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warning(caplog, {"SWAPD_BUDJET": "5", "SWAPD_ZZZ": "1", "OTHER": "2"})
    assert "$SWAPD_BUDJET, $SWAPD_ZZZ" in said
    assert "for $SWAPD_BUDJET, did you mean $SWAPD_BUDGET?" in said
    assert "OTHER" not in said
    assert all(name in warning(caplog, {"SWAPD_ZZZ": "1"}) for name in SETTINGS)


def test_a_service_of_kubernetes_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """For a service called swapd, Kubernetes sets these in every container of its namespace."""
    environ = {
        "SWAPD_SERVICE_HOST": "10.0.0.1",
        "SWAPD_SERVICE_PORT": "8080",
        "SWAPD_SERVICE_PORT_HTTP": "8080",
        "SWAPD_PORT": "tcp://10.0.0.1:8080",
        "SWAPD_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "SWAPD_PORT_8080_TCP_PROTO": "tcp",
        "SWAPD_PORT_8080_TCP_PORT": "8080",
        "SWAPD_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    said = warning(caplog, environ)
    assert all(f"${name}" in said for name in environ)
    assert "Kubernetes" in said


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_s_address_is_no_setting_whatever_it_is_called(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert f"${variable(name)}" in warning(caplog, {variable(name): "tcp://10.0.0.1:8080"})


def test_a_service_s_address_is_neither_an_endpoint_nor_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(module.ENDPOINT_VARIABLE, "udp://10.0.0.1:53")
    assert module.endpoint_from_environment() is None
    assert load(None, {}, {module.CONFIG_VARIABLE: "tcp://10.0.0.1:8080"}) == Config()


def test_an_unknown_flag_is_refused_by_name() -> None:
    done = CliRunner().invoke(app_of(), ["serve", "--budjet", "5"])
    assert done.exit_code == 2
    assert "--budjet" in done.output
    with pytest.raises(ConfigError, match=r"--budjet .* budget"):
        load(None, {"budjet": 5}, {})


# --- bad values --------------------------------------------------------------------------

BAD: list[tuple[str, str, str]] = [
    ("budget", "a lot", "'a lot' is not a size"),
    ("budget", "0", ">= 1"),
    ("chunk", "-2MiB", "is not a size"),
    ("bandwidth", "12GB/h", "is not a rate"),
    ("bandwidth", "0", "is no rate"),
    ("host_memory", "0GiB", ">= 1"),
    ("isolation", "paranoid", "Invalid enum value 'paranoid'; write relaxed or strict"),
    ("ack_timeout", "0", "> 0"),
    ("ack_timeout", "soon", "write it like 50ms"),
    ("residency_factor", "-1", ">= 0"),
    ("patience", "nan", "> 0"),
    ("residency_bound", "nan", ">= 0"),
    ("stop_timeout", "-0.1", ">= 0"),
    # the swap log and the status, which have the rules, could not be read
    *((name, "inf", "<= 1000000000") for name in RULES if isinstance(SAMPLES[name][1], float)),
    *((name, "9" * 20, "<= 9223372") for name in RULES if isinstance(SAMPLES[name][1], int)),
]


@pytest.mark.parametrize(("name", "text", "why"), BAD)
def test_a_bad_value_is_named_with_where_it_came_from(
    name: str, text: str, why: str, tmp_path: Path
) -> None:
    said = refusal(tmp_path, env={variable(name): text})
    assert said.startswith(f"${variable(name)}: ")
    assert why in said
    said = refusal(tmp_path, file=f'{name} = "{text}"')
    assert said.startswith(f"{tmp_path}/swapd.toml: {name}: ")
    assert why in said
    with pytest.raises(ConfigError, match=f"^{flag(name)}: "):
        load(None, {name: text}, {})


@pytest.mark.parametrize(
    "line",
    [
        "budget = true",
        "budget = 1.5",
        "budget = -1",
        "bandwidth = -1.0",
        "bandwidth = 0",
        "host_memory = -5",
        "device = 3",
        "patience = []",
        "patience = nan",
        "swap_log = 1",
        "[isolation]",
    ],
)
def test_a_bad_kind_of_value_in_the_file_is_named(line: str, tmp_path: Path) -> None:
    name = line.strip("[]").split(" ")[0]
    assert refusal(tmp_path, file=line).startswith(f"{tmp_path}/swapd.toml: {name}: ")


def test_a_bad_flag_ends_the_command_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.CONFIG_VARIABLE, "")
    done = CliRunner().invoke(app_of(), ["serve", "--budget", "lots"])
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "--budget: 'lots' is not a size" in done.output


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.toml: No such file"):
        load(tmp_path / "missing.toml", {}, {})
    assert "swapd.toml: " in refusal(tmp_path, file="budget =")
    (tmp_path / "windows.toml").write_bytes(b'\xef\xbb\xbfbudget = "2GiB"\r\n')
    assert load(tmp_path / "windows.toml", {}, {}).budget == 2 << 30
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml: "):
        load(tmp_path / "binary.toml", {}, {})


# --- folders -----------------------------------------------------------------------------


def test_each_device_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert Config().folder == Path("/run/user/1/swapd/host")
    assert Config(device="cuda:1").folder == default_folder("cuda:1")
    assert default_folder("cuda:1") == Path("/run/user/1/swapd/cuda1")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_folder("host")).startswith("/tmp/swapd-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert str(default_folder("host")).startswith("/tmp/swapd-")


def test_an_empty_variable_counts_as_not_set() -> None:
    empty = {"SWAPD_BUDGET": "", "SWAPD_DEVICE": "", "SWAPD_HTTP": "", "SWAPD_LINGER": ""}
    assert load(None, {}, empty) == Config()


def test_a_device_that_there_is_not_gets_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for device in ("", "nope"):
        done = CliRunner().invoke(app_of(), ["serve", "--device", device])
        assert f"there is no device {device!r}; use --device host" in done.output
    assert not list(tmp_path.iterdir())


def test_the_swap_log_is_in_a_folder_that_a_service_manager_does_not_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Config().swap_log_path == tmp_path / "swapd/host/swap-log.jsonl"
    assert Config(device="cuda:1").swap_log_path == tmp_path / "swapd/cuda1/swap-log.jsonl"
    assert Config(runtime_dir="/run/x").swap_log_path == Path("/run/x/swap-log.jsonl")
    assert Config(runtime_dir="/run/x", swap_log="/log").swap_log_path == Path("/log")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/swapd-cuda0:/other")
    assert Config(runtime_dir="/run/x").swap_log_path == Path("/var/lib/swapd-cuda0/swap-log.jsonl")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert Config().swap_log_path == Path("/home/me/.local/state/swapd/host/swap-log.jsonl")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert Config().swap_log_path == Path("/home/me/.local/state/swapd/host/swap-log.jsonl")


def test_without_a_home_the_swap_log_is_in_the_runtime_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def getpwuid(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "XDG_STATE_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with runtime_dir.claim(Config().folder) as folder:
        assert place(Config(), folder) == (folder.path / runtime_dir.SWAP_LOG, folder, None)


def test_folders_are_absolute_because_clients_are_told_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Config(runtime_dir="run", swap_log="log/swap-log.jsonl")
    assert settings.folder == tmp_path / "run"
    assert settings.swap_log_path == tmp_path / "log/swap-log.jsonl"


@pytest.mark.parametrize("evil", ["x\x1b[2J", "a\nb", "\u202egnp", "\udcff", "x" * 5000])
def test_a_setting_that_cannot_be_shown_is_refused(evil: str, tmp_path: Path) -> None:
    for name in ("device", "runtime_dir", "swap_log"):
        for flags, environ in (({name: evil}, {}), ({}, {f"SWAPD_{name.upper()}": evil})):
            with pytest.raises(ConfigError) as refused:
                load(None, flags, environ)
            assert str(refused.value).isprintable()
            assert name in str(refused.value).lower().replace("-", "_")


def test_a_chunk_is_as_stated_or_suits_the_device_and_by_auto_its_budget() -> None:
    sizes = {
        ("host", None): 2 * MIB,
        ("host", "auto"): 2 * MIB,
        ("cuda:0", None): 64 * MIB,
        ("cuda:0", "auto"): 64 * MIB,
        ("cuda:0", "32MiB"): 32 * MIB,
    }
    for (device, chunk), nbytes in sizes.items():
        flags = {"device": device, "budget": "8GiB", **({"chunk": chunk} if chunk else {})}
        assert load(None, flags, {}).chunk_bytes == nbytes
    over = {"device": "cuda:0", "budget": (8 << 30) + 1}
    assert load(None, {**over, "chunk": "auto"}, {}).chunk_bytes == 256 * MIB
    assert load(None, {**over, "chunk": "32MiB"}, {}).chunk_bytes == 32 * MIB
    assert load(None, over, {}).chunk_bytes == 64 * MIB


def test_under_strict_isolation_chunks_are_as_by_auto_unless_said() -> None:
    """There, acquires wait for each chunk that is unmapped."""
    over = {"device": "cuda:0", "budget": (8 << 30) + 1, "isolation": "strict"}
    assert load(None, over, {}).chunk_bytes == 256 * MIB
    assert load(None, {**over, "chunk": "64MiB"}, {}).chunk_bytes == 64 * MIB
    assert load(None, {**over, "budget": "8GiB"}, {}).chunk_bytes == 64 * MIB
    assert load(None, {**over, "device": "host"}, {}).chunk_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("there", "listed", "device"),
    [
        ((), None, "host"),
        ((), "0", "host"),
        (("nvidiactl", "nvidia-uvm"), None, "host"),
        (("nvidiactl", "nvidia0"), None, "cuda:0"),
        (("nvidia0", "nvidia3"), None, "cuda:0"),
        (("nvidia0", "nvidia3"), "3", "cuda:0"),
        (("nvidia0",), "", "host"),
        (("nvidia0",), "-1", "host"),
    ],
)
def test_the_usual_device_is_a_gpu_that_this_process_may_use(
    there: tuple[str, ...],
    listed: str | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in there:
        (tmp_path / name).touch()
    monkeypatch.setattr(config, "_DEVICES", tmp_path)
    if listed is None:
        monkeypatch.delenv(config.VISIBLE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(config.VISIBLE_VARIABLE, listed)
    assert config.usual_device() == device


def test_the_usual_device_gives_way_to_every_setting(tmp_path: Path) -> None:
    usual = {"device": lambda: "cuda:0"}
    assert load(None, {}, {}, usual).device == "cuda:0"
    assert load(None, {}, {"SWAPD_DEVICE": "host"}, usual).device == "host"
    assert load(None, {"device": "cuda:1"}, {"SWAPD_DEVICE": "host"}, usual).device == "cuda:1"
    (tmp_path / "swapd.toml").write_text('device = "cuda:2"')
    assert load(tmp_path / "swapd.toml", {}, {}, usual).device == "cuda:2"
