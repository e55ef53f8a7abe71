"""The strategies on the client's page work as printed there."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from tests.offload.modules import Decoder, Encoder, Pipeline, seeded
from tests.processes import ROOT

PAGE = (ROOT / "client" / "README.md").read_text()
STRATEGIES = PAGE[PAGE.index("## Which strategy") : PAGE.index("## Settings files")]
PROGRAMS = re.findall(r"```python\n(.*?)```", STRATEGIES, re.DOTALL)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Omni(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thinker, self.talker, self.code2wav = Encoder(), Encoder(), Decoder()


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_runs_as_printed(client: Client, program: str) -> None:
    dit = seeded(Layered)
    pipeline = Pipeline(text_encoder=seeded(Encoder), transformer=dit, vae=seeded(Decoder))
    x = torch.ones(1, 512)
    expected = dit(x)
    names: dict[str, Any] = {"client": client, "pipeline": pipeline, "model": seeded(Omni)}
    exec(program, names)
    assert client.status().components
    assert torch.equal(dit(x), expected)


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_everything_on_the_page_is_python(program: str) -> None:
    compile(program, "README", "exec")
