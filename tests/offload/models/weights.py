"""Weights from a seed: every parameter gets a spread, so that each one affects the output."""

import math

import torch


@torch.no_grad()
def draw(module: torch.nn.Module, seed: int, gain: float = 1.0) -> None:
    """Fill every parameter of `module`; equal seeds give bit-identical weights.

    Parameters at zero or one in an untrained model (biases, gates, norms) get a spread, too.
    Matrices keep a signal's size, times `gain`.
    """
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(part, torch.nn.Embedding):
                parameter.normal_(0.0, 1.0, generator=generator)
            elif parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
            elif name == "weight":
                parameter.normal_(1.0, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, 0.05, generator=generator)


def nbytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
