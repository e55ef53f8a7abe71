"""With the code that a plan prints, the model runs in the planned budget, bit for bit."""

import shlex

import pytest
import torch
import yaml

from swapd.plan import snippets
from swapd.plan.advice import SLOTS, Advice, MemoryBudget, ModelComponent, advise
from tests import served

torch.set_num_threads(1)

MIB = 1 << 20
WIDTH = 1024
BLOCK = 4 * MIB  # a linear layer
PASSES = 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Tower(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(torch.nn.Module):
    """Runs its encoder once, its transformer in each of three steps, its VAE at the end."""

    def __init__(self, transformer: int, text_encoder: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.text_encoder = Tower(text_encoder)
        self.transformer = Tower(transformer)
        self.vae = Tower(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_encoder(x)
        for _ in range(3):
            x = self.transformer(x)
        return self.vae(x)  # type: ignore[no-any-return]


def planned(model: Model, room: int) -> Advice:
    components = [
        ModelComponent(name, BLOCK * count, count if count > 1 else 0, BLOCK, 0, passes)
        for name, count, passes in (
            ("text_encoder", len(model.text_encoder.blocks), 1),
            ("transformer", len(model.transformer.blocks), 3),
            ("vae", 1, 1),
        )
    ]
    return advise(components, MemoryBudget(room), 10e9, chunk_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("transformer", "text_encoder", "room", "ways"),
    [
        (3, 2, 64 * MIB, ["keep", "keep", "keep"]),
        (6, 5, 30 * MIB, ["alternate", "alternate", "keep"]),
        (12, 2, 36 * MIB, ["alternate", "stream", "alternate"]),
    ],
)
@torch.inference_mode()
def test_a_model_runs_as_it_was_planned(
    transformer: int, text_encoder: int, room: int, ways: list[str]
) -> None:
    model = Model(transformer, text_encoder)
    x = torch.randn(1, WIDTH)
    expected = model(x)
    advice = planned(model, room)
    assert [p.how for p in advice.placements] == ways
    words = shlex.split(snippets.serve("host", advice.budget_bytes, 2 * MIB))
    budget = words[words.index("--budget") + 1]
    with served.alone(budget=budget, isolation="strict", residency_factor=0) as (_, client):
        exec(snippets.python(advice), {"client": client, "model": model})
        for _ in range(3):
            assert torch.equal(model(x), expected)
        before = client.status().bytes_in
        for _ in range(PASSES):
            model(x)
        status = client.status()
        assert status.bytes_out == 0
        assert status.peak_bytes <= room
        # after its last step, a stream loads the first blocks again; that may evict kept ones
        in_vain = 2 * SLOTS * BLOCK if advice.treated("stream") else 0
        # and what the next pass uses first is loaded ahead: before the first count, or not
        ahead = BLOCK * text_encoder
        assert status.bytes_in - before <= PASSES * (advice.moved_bytes + in_vain) + ahead


@pytest.mark.parametrize("name", ['a"]); boom("', "a, b]", "no", "a: b", "größe", "\\", "dit"])
def test_a_name_is_pasted_as_a_name_whoever_gave_it(name: str) -> None:
    """The folder of a downloaded model may have any name."""
    components = [ModelComponent(one, 64 * MIB, 8, 8 * MIB) for one in (name, "other")]
    advice = advise(components, MemoryBudget(64 * MIB), 10e9, chunk_bytes=2 * MIB)
    attached: list[str] = []

    class Client:
        def attach(self, model: object, names: list[str], **how: object) -> None:
            attached.extend(names)

    exec(snippets.python(advice), {"client": Client(), "model": None})
    assert sorted(attached) == sorted([name, "other"])
    (stage,) = yaml.safe_load(snippets.stage_file(advice))["stages"]
    assert sorted(stage["additional_config"]["swapd"]["cpu_offload_components"]) == sorted(
        [name, "other"]
    )
