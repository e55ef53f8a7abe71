"""A plan counts for each stage the tensors that vllm-omni's own loaders take."""

from pathlib import Path

from swapd_client.vllm import checkpoint
from tests.vllm.engines import Nursery


def test_each_stage_of_each_model_takes_the_tensors_that_are_counted(
    tmp_path: Path, nursery: Nursery
) -> None:
    loaders = nursery.call("tests.vllm.loaders:all_of_them", str(tmp_path))
    found = {(kind, stage) for kind, stage, *_ in loaders}
    assert {("qwen2_5_omni", "talker"), ("qwen3_omni_moe", "talker")} <= found
    assert checkpoint.BORROWED.keys() <= found
    for kind, stage, shown, taken in loaders:
        counted = [name for name in shown if name.startswith(checkpoint.prefixes_of(kind, stage))]
        assert taken == sorted(counted), (kind, stage)
        assert taken, (kind, stage)
