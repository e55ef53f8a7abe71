"""`python -m benchmarks.offload`: swapd beside the offloaders that work inside one process.

One pipeline (`model.py`) makes pictures, over and over, on a device that holds its DiT but not
its encoders too: by swapd, by diffusers' `enable_model_cpu_offload` and by vLLM-Omni's
`enable_cpu_offload`, in turn in one run. There is no GPU: swapd uses its host device, and the
others use memory that stands in for one (`stand_in.py`), with the same throttle.

Lives here: measuring and reporting. swapd imports nothing from here.
"""
