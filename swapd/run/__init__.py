"""`swapd run`: commands with the daemons that they need, from before they start until they end.

| file | about |
| --- | --- |
| `commands.py` | command lines, and the options of servers in them; pure |
| `servers.py` | servers of vLLM and vLLM-Omni: models, GPUs, deploy files, workers |
| `gpus.py` | GPUs that a command may use, and the GPU behind each number |
| `file.py` | settings of daemons; FILE.toml |
| `budgets.py` | the budget of each daemon |
| `daemons.py` | daemons that a run joins, or starts and ends |
| `child.py` | a process that gets the signals of this one, and ends with it |
| `stages.py` `runner.py` `guard.py` | starts, restarts and ends of stages (pure); their processes |
| `output.py` | the output of stages |
| `outcome.py` | swaps and waits of a run, from the swap log; pure |
| `sampling.py` `ready.py` | peak memory; whether a server answers |
"""
