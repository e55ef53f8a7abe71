"""`python -m benchmarks.vllm`: real vLLM engines with swapd's plugin, beside the same without.

Runs in the environment of `make test-vllm`, with its harness: tiny models, no GPU, one thread for
each engine. Both sides are measured in turn in one run.

Lives here: measuring and reporting. swapd imports nothing from here.
"""
