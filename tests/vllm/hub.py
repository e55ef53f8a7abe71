"""Importing this has vLLM take a model's id for one of the hub, whose cache is at $TESTS_VLLM_HUB.

Offline, vLLM gives itself the folder in place of the id.
"""

import os
from types import SimpleNamespace

from huggingface_hub import constants
from vllm.engine import arg_utils

constants.HF_HUB_CACHE = os.environ["TESTS_VLLM_HUB"]  # noqa: TID251
arg_utils.huggingface_hub = SimpleNamespace(constants=SimpleNamespace(HF_HUB_OFFLINE=False))
