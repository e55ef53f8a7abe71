"""`swapd run FILE.toml`: several commands with names, and the daemons that they share.

| file | lives there |
| --- | --- |
| `file.py` | the file: read and checked |
| `stages.py` | when each stage starts, restarts and ends; pure |
| `runner.py` | the processes of stages |
| `guard.py` | a process that ends stages if `swapd run` is killed |
| `lines.py` | a stage's output, as lines with its name; pure |
| `output.py` | the output of all stages on one stream |
| `outcomes.py` | the outcome of each stage, from the swap log; pure |
"""
