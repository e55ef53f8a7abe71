"""The daemon that a rank connects to."""

import pytest

from swapd.shared.config import default_folder
from swapd_client.vllm.gpus import NoEndpoint, folder_of, number_of


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWAPD_ENDPOINT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "environment", "setting", "gpu", "folder"),
    [
        (None, None, "", 1, default_folder("cuda:1")),
        (None, None, "", None, default_folder("host")),
        ("2, 3", None, "", 1, default_folder("cuda:3")),
        ("2, 3", None, "/run/swapd/gpu{gpu}", 0, "/run/swapd/gpu2"),
        ("", None, "/run/swapd/gpu{gpu}", 1, "/run/swapd/gpu1"),  # an empty list is no list
        (None, "/elsewhere/{gpu}", "/run/swapd/one", 0, "/run/swapd/one"),
        (None, "/elsewhere/{gpu}", "", 1, "/elsewhere/1"),
        (None, None, "/run/swapd/gpu{gpu}", None, "/run/swapd/gpu7"),  # without GPUs: the rank
    ],
)
def test_the_folder_is_that_of_the_gpu_by_its_number_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    environment: str | None,
    setting: str,
    gpu: int | None,
    folder: object,
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("SWAPD_ENDPOINT", environment)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert str(folder_of(setting, gpu, rank=7)) == str(folder)


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
