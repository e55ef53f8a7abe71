"""`python -m benchmarks.vllm`: real vLLM engines with swapd's plugin, beside the same without.

Runs in the environment of `make test-vllm`, by that harness: tiny models, no GPU, one thread for
each engine. Both sides are measured in turn in one run.

Lives here: measuring and telling. Nothing here is imported by swapd.
"""
