"""Everything that a whole vllm-omni server imports: a process that has imported this forks servers.

Two packages are stubs, because no request of these tests calls them: torchaudio, which has no build
for this torch, and PyAV, which writes films.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Stub(ModuleType):
    """A module and package that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


STUBS = ("av", "torchaudio", "torchaudio.functional", "torchaudio.transforms")
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen2_5_omni_thinker",
    "vllm_omni.engine.orchestrator",
    "vllm_omni.engine.stage_engine_core_proc",
    "vllm_omni.entrypoints.async_omni",
    "vllm_omni.entrypoints.cli.main",
    "vllm_omni.entrypoints.cli.serve",
    "vllm_omni.entrypoints.openai.api_server",
    "vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni",
    "vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni_talker",
    "vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni_token2wav",
    "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni",
    "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_code2wav",
    "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_talker",
    "tests.vllm.omni_server.workers",
)

for name in STUBS:
    sys.modules.setdefault(name, Stub(name))
for name in MODULES:
    import_module(name)
