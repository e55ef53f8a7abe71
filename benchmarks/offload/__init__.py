"""`python -m benchmarks.offload`: swapd beside the offloaders that work inside one process.

One pipeline (`model.py`) makes pictures, over and over, on a device that holds its DiT but not
its encoders too: by swapd, by diffusers' `enable_model_cpu_offload` and by vLLM-Omni's
`enable_cpu_offload`, in turn in one run. There is no GPU: swapd uses its host device, and the
others memory that stands in for one (`stand_in.py`), throttled alike.

Lives here: measuring and telling. Nothing here is imported by swapd.
"""
