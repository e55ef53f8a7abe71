"""The daemon that a rank connects to."""

import pytest

from swapd.shared.config import default_folder
from swapd_client.vllm.gpus import NoEndpoint, folder_of, number_of


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWAPD_ENDPOINT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_a_word_it_is_the_folder_of_the_gpu() -> None:
    assert folder_of("", 1, rank=1) == default_folder("cuda:1")
    assert folder_of("", None) == default_folder("host")


def test_the_number_is_that_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert [number_of(0), number_of(1)] == [2, 3]
    assert folder_of("", 1, rank=1) == default_folder("cuda:3")
    assert str(folder_of("/run/swapd/gpu{gpu}", 0)) == "/run/swapd/gpu2"


def test_an_empty_list_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert number_of(1) == 1


def test_the_settings_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPD_ENDPOINT", "/elsewhere/{gpu}")
    assert str(folder_of("/run/swapd/one", 0)) == "/run/swapd/one"
    assert str(folder_of("", 1)) == "/elsewhere/1"


def test_without_gpus_the_rank_is_the_number() -> None:
    assert str(folder_of("/run/swapd/gpu{gpu}", None, rank=1)) == "/run/swapd/gpu1"


def test_uuids_need_an_endpoint_that_has_no_number_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c,GPU-77aa")
    for endpoint in ("", "/run/swapd/gpu{gpu}"):
        with pytest.raises(NoEndpoint, match=r"GPU-8f1c,GPU-77aa .*endpoint"):
            folder_of(endpoint, 0)
    assert str(folder_of("/run/swapd/mine", 0)) == "/run/swapd/mine"


def test_what_the_list_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(NoEndpoint, match=r"CUDA_VISIBLE_DEVICES=4 .* 1"):
        number_of(1)


def test_a_misspelt_pattern_is_refused() -> None:
    with pytest.raises(NoEndpoint, match=r"\{gpu\}"):
        folder_of("/run/swapd/gpu{gpus}", 0)
