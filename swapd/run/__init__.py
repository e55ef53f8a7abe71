"""`swapd run`: a command with the daemons that it needs, from before it starts until it ends.

| file | lives there |
| --- | --- |
| `commands.py` | kinds of command lines, and options for swapd; pure |
| `plans.py` | the plan of a run: daemons, files, the final command |
| `models.py` | the folder of a server's model |
| `gpus.py` | GPUs that a command may use, and the GPU behind each number |
| `budgets.py` | the budget of each device's daemon |
| `daemons.py` | daemons that a run joins or starts, and ends |
| `child.py` | the command: it gets this process's signals, and `swapd run` waits for its end |
| `settings.py` | the settings of a run |
| `needs.py` | whether a command names swapd's classes itself |
| `measured.py` | a command under measurement, which ends a server |
| `ready.py` | whether a server answers |
| `sampling.py` | a command's peak memory |
| `compared.py` | two ways of running a command, side by side; pure |
| `line.py` | the status line at the terminal's bottom |
| `several/` | several commands with names, from a file |
| `outcome.py` | the outcome of a run, from the swap log; pure |
"""
