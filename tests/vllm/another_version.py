"""Importing this makes vLLM report another version."""

import vllm

vllm.__version__ = "0.29.0"
