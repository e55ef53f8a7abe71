"""Importing this makes vLLM say that it is another version."""

import vllm

vllm.__version__ = "0.29.0"
