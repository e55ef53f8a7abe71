"""The printed settings and code agree with the plan, and are read back as such."""

from pathlib import Path

from swapd.plan import deploy, snippets
from swapd.plan.advice import Advice, MemoryBudget, ModelComponent, advise
from swapd_client.offload.settings import from_yaml
from tests.files import file_with

GIB = 1 << 30


def advised(room: float, *components: ModelComponent) -> Advice:
    return advise(components, MemoryBudget(round(room * GIB)), 25e9)


def part(name: str, gib: float, count: int = 0, passes: int = 1) -> ModelComponent:
    nbytes = round(gib * GIB)
    return ModelComponent(name, nbytes, count, nbytes // max(count, 1), 0, passes)


def written(folder: Path, advice: Advice) -> Path:
    return file_with(folder / "stages.yaml", snippets.stage_file(advice))


def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    advice = advised(8, part("model", 4, 16))
    assert from_yaml(written(tmp_path, advice)).mode == "off"
    assert snippets.python(advice) == 'client.attach(model, ["model"], policy="permanent")\n'
    line = "swapd serve --device cuda:1 --budget 4GiB --chunk 64MiB"
    assert snippets.serve("cuda:1", advice.budget_bytes, 64 << 20) == line
    strict = snippets.serve("cuda:1", advice.budget_bytes, 256 << 20, "strict")
    assert strict == "swapd serve --device cuda:1 --budget 4GiB --chunk 256MiB --isolation strict"


def test_what_is_streamed_in_part_says_how_much_stays_on_the_host(tmp_path: Path) -> None:
    advice = advised(6, part("model", 16, 32))
    settings = from_yaml(written(tmp_path, advice))
    assert settings.mode == "partial"
    kept = advice.placements[0].kept_bytes
    assert 0 <= settings.offloaded_bytes - (16 * GIB - kept) < GIB // 8
    assert snippets.python(advice) == 'client.attach(model, ["model"], resident="5GiB")\n'


def test_stages_are_stages_of_the_file(tmp_path: Path) -> None:
    advice = advised(
        19, part("thinker", 17, 28, 100), part("talker", 3, 24, 100), part("code2wav", 1.5)
    )
    path = written(tmp_path, advice)
    assert from_yaml(path, "thinker").mode == "alternating"
    assert from_yaml(path, "talker").mode == "alternating"
    assert from_yaml(path, "code2wav").mode == "off"
    read = deploy.read(path).stages
    assert [(s.name, s.kind, s.stays) for s in read] == [
        ("thinker", "ar", False),
        ("talker", "ar", False),
        ("code2wav", "generation", True),
    ]
    assert all(s.ours for s in read)
    lines = snippets.python(advice).splitlines()
    assert lines == [
        'client.attach(model, ["code2wav"], policy="permanent")',
        'client.attach(model, ["thinker", "talker"], cpu_offload_enabled=True)',
    ]


def test_components_of_one_stage_are_named_in_it(tmp_path: Path) -> None:
    advice = advised(10, part("transformer", 9, passes=20), part("text_encoder", 8), part("vae", 1))
    path = written(tmp_path, advice)
    settings = from_yaml(path)
    assert settings.mode == "alternating"
    assert settings.cpu_offload_components == ("transformer", "text_encoder")
    (stage,) = deploy.read(path).stages
    assert (stage.kind, stage.offload) == ("diffusion", settings)


def test_several_that_are_streamed_are_streamed_by_layers(tmp_path: Path) -> None:
    advice = advised(4, part("transformer", 16, 32, 20), part("text_encoder", 8, 32))
    settings = from_yaml(written(tmp_path, advice))
    assert settings.mode == "layerwise"
    assert settings.cpu_offload_components == ("transformer", "text_encoder")


def test_where_one_switch_is_too_few_the_file_says_so(tmp_path: Path) -> None:
    advice = advised(9, part("transformer", 16, 32, 20), part("a", 8), part("b", 7))
    text = snippets.stage_file(advice)
    assert "# a stage has one option" in text
    assert from_yaml(written(tmp_path, advice)).mode == "layerwise"


def test_what_alternates_leaves_at_once_where_something_else_stays_in_part() -> None:
    advice = advised(8, part("transformer", 16, 32, 20), part("a", 8), part("b", 7))
    assert 'cpu_offload_strategy="sequential"' not in snippets.python(advice)
    advice = advised(12, part("transformer", 16, 32, 20), part("a", 8), part("b", 7))
    assert 'cpu_offload_strategy="sequential"' in snippets.python(advice)
