"""Puts the layers of a model into host memory as vLLM builds them: a GPU may not hold them all."""

from collections.abc import Iterable

from torch.nn import Module
from vllm.model_executor.offloader.base import NoopOffloader


class HostLayers(NoopOffloader):  # type: ignore[misc]
    """In the place of vLLM's offloaders, which move layers into host memory as well."""

    def wrap_modules(self, modules_generator: Iterable[Module], prefix: str = "") -> list[Module]:
        return [layer.to("cpu") for layer in modules_generator]
