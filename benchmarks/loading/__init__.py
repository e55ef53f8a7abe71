"""`python -m benchmarks.loading`: a checkpoint by swapd, and by transformers' from_pretrained.

What in-process offloaders do after `from_pretrained` is to copy every weight to pinned memory;
here, where nothing can be pinned, to fresh memory, one by one. Each load is a process of its own.

Lives here: measuring and telling. Nothing here is imported by swapd.
"""
