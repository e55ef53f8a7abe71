"""A stage that starts again reads none of its weights, where the daemon has kept them."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swapd_client.weights import safetensors
from tests.guarantees import harness
from tests.vllm.engine import DRIVES
from tests.vllm.engines import REQUESTS, TOKENS, Engine, Scene, on_swapd, plain, scene
from tests.vllm.models import MODELS, write_fp8
from tests.vllm.zoo import SIZES, write_adapter

Answers = list[list[list[int]]]
Expected = Mapping[str, Answers]

COUNTING = "tests.vllm.counting."
FLOATS = "tests.vllm.fp8"
HOPEFUL = "tests.vllm.hopeful"


def await_settled(folder: Path) -> None:
    for path in folder.iterdir():
        settled = False
        while not settled:
            with closing(safetensors.File(path)) as file:
                settled = file.is_settled


def started(
    scene: Scene,
    daemon: harness.Daemon,
    model: Path,
    worker: str = "Worker",
    imports: str = "",
    **more: Any,
) -> tuple[Engine, int]:
    """An engine, ready, and how many tensors it has read."""
    how = on_swapd(model, daemon.folder, worker_cls=f"{COUNTING}{worker}", **more)
    (engine,) = scene.start(how, imports=imports)
    (read,) = engine.call("tensors_read")
    return engine, read


def end(engine: Engine, daemon: harness.Daemon) -> None:
    engine.close()
    while daemon.status().components:
        daemon.await_record("SessionGone")


def served(
    scene: Scene, daemon: harness.Daemon, model: Path, worker: str = "Worker", **more: Any
) -> tuple[Answers, int]:
    """An engine starts, answers and ends: its answers, and how many tensors it read."""
    engine, read = started(scene, daemon, model, worker, **more)
    said = [engine.generate(few, TOKENS) for few in REQUESTS]
    end(engine, daemon)
    return said, read


@pytest.fixture
def daemon(scene: Scene) -> harness.Daemon:
    return scene.daemon(keep_host="256MiB")


@pytest.fixture
def talker(models: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    folder = tmp_path / "talker"
    shutil.copytree(models / "talker", folder)
    await_settled(folder)
    return folder


@pytest.mark.parametrize("name", ["thinker", "talker"])
def test_a_stage_that_starts_again_reads_no_weight_and_answers_as_plain_vllm(
    scene: Scene, daemon: harness.Daemon, models: Path, expected: Expected, name: str
) -> None:
    await_settled(models / name)
    for number in range(3):
        said, read = served(scene, daemon, models / name)
        assert said == expected[name]
        assert bool(read) == (number == 0)


def test_nor_one_whose_model_is_an_id_of_hugging_face_s_hub(
    scene: Scene, daemon: harness.Daemon, models: Path, expected: Expected
) -> None:
    cache, commit = scene.folder / "hub", "c" * 40
    hub = cache / "models--org--talker"
    blobs = shutil.copytree(models / "talker", hub / "blobs")
    (snapshot := hub / "snapshots" / commit).mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    await_settled(snapshot)
    for number in range(2):
        engine = scene.process("talker", TESTS_VLLM_HUB=str(cache))
        engine.imports("tests.vllm.hub")
        engine.start(**on_swapd(Path("org/talker"), daemon.folder, worker_cls=f"{COUNTING}Worker"))
        assert [engine.generate(few, TOKENS) for few in REQUESTS] == expected["talker"]
        assert bool(engine.call("tensors_read")[0]) == (number == 0)
        end(engine, daemon)


def test_nor_with_the_next_daemon(
    scene: Scene, daemon: harness.Daemon, models: Path, expected: Expected
) -> None:
    await_settled(models / "talker")
    for number in range(2):
        said, read = served(scene, daemon, models / "talker")
        assert said == expected["talker"]
        assert bool(read) == (number == 0)
        kept = len(daemon.status().kept)
        daemon.kill()
        daemon = scene.daemon_again(daemon, keep_host="256MiB")
        while len(daemon.status().kept) < kept:
            """They are mapped first."""


def test_nor_one_of_several_parts(deep: Path, nursery: Any, expected_deep: Expected) -> None:
    await_settled(deep / "deep")
    with scene(deep, nursery) as made:
        daemon = made.daemon(budget="192MiB", keep_host="256MiB")
        for number in range(2):
            said, read = served(made, daemon, deep / "deep")
            assert len(daemon.status().kept) > 1
            assert said == expected_deep["deep"]
            assert bool(read) == (number == 0)
        daemon.observer.forget(daemon.status().kept[0].name)
        assert served(made, daemon, deep / "deep")[1], "a part of it is not kept"


#: The starts of a stage with two ranks: whether it reads, and what it imports. From the second on
#: a part of it is forgotten after each.
STARTS = ((True, ""), (False, ""), (True, ""), (True, HOPEFUL))


@pytest.mark.parametrize(
    ("division", "starts"),
    [("tensor_parallel_size", STARTS), ("pipeline_parallel_size", STARTS[:2])],
)
def test_ranks_read_none_of_their_weights_or_all(
    scene: Scene, models: Path, division: str, starts: Sequence[tuple[bool, str]]
) -> None:
    """Each has a daemon of its own, which may have kept what another has not."""
    await_settled(models / "talker")
    daemons = [scene.daemon(keep_host="256MiB") for _ in range(2)]
    pattern = daemons[0].folder.with_name("d{gpu}")
    division_of: dict[str, Any] = {division: 2}
    (alone,) = scene.start(plain(models / "talker", **division_of))
    expected = [alone.generate(few, TOKENS) for few in REQUESTS]
    alone.close()
    for number, (reads, imports) in enumerate(starts):
        how = on_swapd(models / "talker", pattern, worker_cls=f"{COUNTING}Worker", **division_of)
        (engine,) = scene.start(how, imports=imports)
        assert [engine.generate(few, TOKENS) for few in REQUESTS] == expected
        assert [bool(read) for read in engine.call("tensors_read")] == [reads] * 2
        engine.close()
        for daemon in daemons:
            while daemon.status().components:
                daemon.await_record("SessionGone")
        if number:
            daemons[1].observer.forget()


def test_nor_one_of_8_bit_floats(scene: Scene, tmp_path: Path) -> None:
    model = tmp_path / "fp8"
    write_fp8(model, MODELS["talker"])
    await_settled(model)
    (alone,) = scene.start(plain(model), imports=FLOATS)
    expected = [alone.generate(few, TOKENS) for few in REQUESTS]
    alone.close()
    daemon = scene.daemon(keep_host="256MiB")
    for number in range(2):
        said, read = served(scene, daemon, model, imports=FLOATS)
        assert said == expected
        assert bool(read) == (number == 0)


DRIVEN: Any = {DRIVES: "tests.vllm.asked:Asked"}
PROMPTS = ({"prompt": [40, 41, 42, 43] * 4}, {"prompt": [50, 51]})


def asked(scene: Scene, model: Path, how: dict[str, Any], sets: Any) -> tuple[Any, int]:
    """The answers of an engine for all kinds of requests, and how many tensors it read."""
    engine = scene.process(model.name, **DRIVEN)
    engine.start(**how)
    said = engine.answer(sets)
    read = engine.call("tensors_read")[0] if "additional_config" in how else 0
    engine.close()
    return said, read


def twice(scene: Scene, talker: Path, sets: Any, **more: Any) -> Callable[[], int]:
    """An engine starts twice; how many tensors a third one reads."""
    expected, _ = asked(scene, talker, plain(talker, **more), sets)
    daemon = scene.daemon(budget="128MiB", keep_host="256MiB")
    how = on_swapd(talker, daemon.folder, worker_cls=f"{COUNTING}Worker", **more)
    for number in range(2):
        said, read = asked(scene, talker, how, sets)
        assert said == expected
        assert bool(read) == (number == 0)
        while daemon.status().components:
            daemon.await_record("SessionGone")
    return lambda: asked(scene, talker, how, sets)[1]


def test_nor_one_with_adapters(scene: Scene, talker: Path, tmp_path: Path) -> None:
    (adapter := tmp_path / "adapter").mkdir()
    write_adapter(adapter, {**SIZES, "hidden_size": 512, "head_dim": 64})
    sets = [PROMPTS, [{**one, "lora": str(adapter)} for one in PROMPTS]]
    twice(scene, talker, sets, enable_lora=True, max_loras=1, max_lora_rank=8)


def test_nor_one_that_speculates_by_n_grams(scene: Scene, talker: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    twice(scene, talker, [PROMPTS], speculative_config=drafts)


def test_nor_one_with_a_model_that_drafts_unless_that_one_changes(
    scene: Scene, talker: Path, models: Path, tmp_path: Path
) -> None:
    drafter = shutil.copytree(models / "code2wav", tmp_path / "drafter")
    await_settled(drafter)
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 1}
    again = twice(scene, talker, [PROMPTS], speculative_config=drafts)
    shutil.copytree(models / "talker", drafter, dirs_exist_ok=True)
    await_settled(drafter)
    assert again()


def rewrite(model: Path, other: Path) -> None:
    """In place: the file keeps its size, its mtime and its inode."""
    path = model / "model.safetensors"
    before = path.stat()
    path.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def replace(model: Path, other: Path) -> None:
    (model / "model.safetensors").unlink()
    shutil.copy2(other / "model.safetensors", model)


def leave(model: Path, other: Path) -> None:
    """It stays as it is."""


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (rewrite, {}),
        (replace, {}),
        (leave, {"dtype": "float16"}),
        (leave, {"hf_overrides": {"rms_norm_eps": 0.1}}),
    ],
    ids=["rewritten", "replaced", "dtype", "hf_overrides"],
)
def test_what_has_changed_is_read_again(
    scene: Scene,
    daemon: harness.Daemon,
    talker: Path,
    other: Path,
    expected: Expected,
    change: Callable[[Path, Path], None],
    how: dict[str, Any],
) -> None:
    assert served(scene, daemon, talker)[0] == expected["talker"]
    change(talker, other)
    said, read = served(scene, daemon, talker, **how)
    assert read
    (alone,) = scene.start(plain(talker, **how))
    assert said == [alone.generate(few, TOKENS) for few in REQUESTS]
    assert said != expected["talker"]


def test_each_thing_that_makes_the_weights_is_in_their_key(
    scene: Scene, daemon: harness.Daemon, talker: Path
) -> None:
    engine, _ = started(scene, daemon, talker)
    (keys,) = engine.call("keys")
    assert keys.pop("again") == keys[""]
    assert len({*keys.values()}) == len(keys), keys
    (talker / "config.json").touch()
    assert engine.call("keys")[0][""] == "", "a file that was written a moment ago"


@pytest.mark.parametrize("worker", ["Loaded", "Processed", "Checked"])
def test_a_model_in_which_more_than_parameters_is_made_of_weights_is_read_each_time(
    scene: Scene, daemon: harness.Daemon, talker: Path, expected: Expected, worker: str
) -> None:
    for _ in range(2):
        said, read = served(scene, daemon, talker, worker)
        assert read
        assert said == expected["talker"]
    assert daemon.status().kept


def test_what_goes_after_it_was_found_is_read(
    scene: Scene, daemon: harness.Daemon, talker: Path, expected: Expected
) -> None:
    engine = scene.process("talker")
    engine.imports(HOPEFUL)
    engine.start(**on_swapd(talker, daemon.folder, worker_cls=f"{COUNTING}Worker"))
    assert "reads no weights" in engine.log
    assert "reads its files after all" in engine.log
    assert engine.call("tensors_read")[0]
    assert [engine.generate(few, TOKENS) for few in REQUESTS] == expected["talker"]


def test_new_weights_are_not_what_the_next_start_finds(
    scene: Scene, daemon: harness.Daemon, talker: Path, other: Path, expected: Expected
) -> None:
    engine, _ = started(scene, daemon, talker)
    engine.call("reload_weights", None, str(other))
    assert engine.generate(REQUESTS[0], TOKENS) != expected["talker"][0]
    end(engine, daemon)
    assert served(scene, daemon, talker)[0] == expected["talker"]


def test_a_daemon_that_keeps_nothing_has_the_files_read(
    scene: Scene, talker: Path, expected: Expected
) -> None:
    daemon = scene.daemon()
    for _ in range(2):
        said, read = served(scene, daemon, talker)
        assert read
        assert said == expected["talker"]
