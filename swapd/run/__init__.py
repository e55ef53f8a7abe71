"""`swapd run`: a command with the daemons that it needs, from before it starts until it ends.

| file | lives there |
| --- | --- |
| `commands.py` | what a command line is, and what is added to it; pure |
| `plans.py` | what is to be started for it: daemons, files, the command as it is run |
| `interpreter.py` | the Python that the command runs on, which is asked where a package is |
| `budgets.py` | how much of each device its daemon gets |
| `daemons.py` | daemons that are joined or started, and ended |
| `child.py` | the command: signals are passed on, its end is waited for |
| `settings.py` | the settings with which a command is run |
| `kept.py` | settings that proved good, by model, in one file of the state folder |
| `measured.py` | a command that is run to be measured, and ended if it does not end by itself |
| `ready.py` | when a server answers |
| `sampling.py` | how much memory a command takes at most |
| `compared.py` | two ways of running a command, side by side; pure |
| `line.py` | the one line that says what happens, at the terminal's bottom |
| `several/` | several commands with names, from a file |
| `outcome.py` | what the swap log says of it afterwards; pure |
"""
