"""`swapd run FILE.toml`: several commands with names, and the daemons that they share.

| file | lives there |
| --- | --- |
| `file.py` | the file: read and checked |
| `stages.py` | when each stage starts, starts again and ends; pure |
| `runner.py` | the processes of stages |
| `guard.py` | what ends stages if `swapd run` is killed |
| `lines.py` | what a stage writes, as lines with its name; pure |
| `output.py` | the output of all of them on one stream |
| `outcomes.py` | what the swap log says of each stage afterwards; pure |
"""
