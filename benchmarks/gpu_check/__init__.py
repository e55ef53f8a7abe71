"""`make gpu-check`: everything that only a GPU can show, in one command and two files.

`python -m benchmarks.gpu_check` runs the sections listed in `plan.py`, each in a process of
its own with a time limit of its own, and writes their rows as they come: one JSON file and
one table. A section that crashes, hangs or spoils its CUDA context costs its own rows only.

Lives here: measuring and reporting. swapd imports nothing from here.
"""
