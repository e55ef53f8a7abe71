"""`python -m benchmarks.loading`: a checkpoint by swapd, and by transformers' from_pretrained.

After `from_pretrained`, in-process offloaders copy every weight to pinned memory; here, where
nothing can be pinned, to fresh memory, one by one. Each load is a process of its own.

Lives here: measuring and reporting. swapd imports nothing from here.
"""
