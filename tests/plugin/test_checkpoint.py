"""The bytes that a stage loads are those of the files that vLLM reads."""

from pathlib import Path

from swapd_client.vllm import checkpoint
from tests.plan.test_sizes import save

MODEL = "Owner/Model-7B"
COMMITS = {"main": "a" * 40, "8bit": "b" * 40}


def test_a_model_in_the_cache_is_counted_at_its_revision_and_in_that_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--Owner--Model-7B"
    (folder / "refs").mkdir(parents=True)
    for number, (revision, commit) in enumerate(COMMITS.items(), 1):
        save(folder / "snapshots" / commit / "model.safetensors", w=number << 20)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        (folder / "refs" / revision).write_text(commit)
    for asked, nbytes in ((None, 1 << 20), ("8bit", 2 << 20), (COMMITS["8bit"], 2 << 20)):
        found = checkpoint.folder_of(MODEL, asked, str(tmp_path))
        assert found is not None
        assert checkpoint.nbytes_of(found, "") == nbytes
    assert checkpoint.folder_of(MODEL, "4bit", str(tmp_path)) is None
    assert checkpoint.folder_of(MODEL, None, str(tmp_path / "other")) is None
    assert checkpoint.folder_of("no id/of/a model") is None
    assert checkpoint.folder_of(str(folder), "8bit") == folder
