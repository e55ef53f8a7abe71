"""The files under deploy/ say what the code does."""

from pathlib import Path

from swapd.config import Config, load

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_example_file_states_the_defaults() -> None:
    assert load(DEPLOY / "swapd.example.toml", {}, {}) == Config()


def test_the_example_file_names_every_setting() -> None:
    text = (DEPLOY / "swapd.example.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    for name in Config.__struct_fields__:
        assert any(line.startswith(f"{name} = ") for line in lines), name


def test_the_unit_waits_for_the_readiness_message() -> None:
    assert "Type=notify" in (DEPLOY / "swapd@.service").read_text()
