"""A model is found by its id in the cache of Hugging Face, and nothing is downloaded."""

import json
import os
from pathlib import Path

import pytest

from swapd.plan import hub, sizes
from swapd.shared import config
from tests.plan.test_sizes import save
from tests.processes import output_of

MODEL = "Owner/Model-7B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def put(cache: Path, revision: str = "main", commit: str = COMMIT, model: str = MODEL) -> Path:
    """The folder of a model's files, laid out as huggingface_hub does: links to blobs."""
    folder = cache / f"models--{model.replace('/', '--')}"
    save(folder / "blobs" / "b.safetensors", w=1 << 20)
    made = folder / "snapshots" / commit
    made.mkdir(parents=True)
    (made / "model.safetensors").symlink_to("../../blobs/b.safetensors")
    (ref := folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return made


@pytest.mark.parametrize(
    ("variable", "value", "cache"),
    [
        ("HF_HUB_CACHE", "$HOME/a", "a"),
        ("HUGGINGFACE_HUB_CACHE", "~/b", "b"),
        ("HF_HOME", "~/c", "c/hub"),
        ("XDG_CACHE_HOME", "~/d", "d/huggingface/hub"),
        ("HF_HOME", "", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, cache: str
) -> None:
    monkeypatch.setenv(variable, value)
    made = put(tmp_path / cache)
    assert hub.folder_of(MODEL) == made
    (found,) = sizes.of_path(sizes.found(MODEL))
    assert (found.name, found.nbytes) == ("Model-7B", 1 << 20)


@pytest.mark.parametrize("value", ["~nobody-of-this-name/hub", None])
def test_a_home_that_is_not_there_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """As of a user of a container that has no account there."""
    if value is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 1 << 31)
    else:
        monkeypatch.setenv("HF_HOME", value)
    with pytest.raises(hub.NotInCache, match="~"):
        hub.folder_of(MODEL)


def test_the_library_finds_the_same_folder(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    made = put(tmp_path / "hub")
    program = f"""
from huggingface_hub import snapshot_download
print(snapshot_download({MODEL!r}, local_files_only=True))
"""
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    assert Path(output_of(program, env=env, anew=True).strip()) == made


def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path) -> None:
    cache = config.hub_cache()
    main, other = put(cache), put(cache, "refs/pr/1", "f" * 40)
    assert hub.folder_of(MODEL, "refs/pr/1") == hub.folder_of(MODEL, "f" * 40) == other
    assert hub.folder_of(MODEL) == main
    with pytest.raises(hub.NotInCache, match=f"{MODEL} at revision v2 is neither .*--revision v2`"):
        hub.folder_of(MODEL, "v2")
    assert (
        hub.folder_of(MODEL, cache=put(tmp_path / "x", commit="e" * 40).parents[2]).name[0] == "e"
    )


def test_a_folder_goes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(config.hub_cache())
    (tmp_path / MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.folder_of(MODEL) == Path(MODEL)


def test_what_is_not_there_or_not_whole_is_refused_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(hub.NotInCache, match=f"at {tmp_path}/.cache.* by `hf download Owner/Model"):
        hub.folder_of(MODEL)
    made = put(config.hub_cache())
    listed = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(hub.NotInCache, match=r"without model-2.safetensors: get the rest by `hf"):
        hub.folder_of(MODEL)
    (made / "model-2.safetensors").symlink_to("../../blobs/partly")
    with pytest.raises(hub.NotInCache, match=r"without model-2.safetensors"):
        hub.folder_of(MODEL)


@pytest.mark.parametrize("model", ["../x", "a/../b", "/etc", "a/b/c", "", ".", "a\0b", "s3://x/y"])
def test_no_name_leads_out_of_the_cache(model: str, tmp_path: Path) -> None:
    put(config.hub_cache())
    assert hub.cached(model) is None
    assert hub.cached(MODEL, "../../../models--Owner--Model-7B") is None
    (config.hub_cache() / "models--Owner--Model-7B" / "refs" / "main").write_text("../../..")
    assert hub.cached(MODEL) is None


def test_the_library_is_not_imported() -> None:
    program = "import sys; import swapd.run.servers\nprint('huggingface_hub' in sys.modules)"
    assert output_of(program, anew=True) == "False\n"
