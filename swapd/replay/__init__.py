"""Runs a recorded swap log again under other settings, in seconds, with the real core. Does no I/O.

`work.py` reads from a log who asked for what, and how long after what. `rerun.py` runs that on a
device without bytes or a clock. `optimum.py` finds the fewest bytes that any choice of evictions
would have loaded, and `search.py` better settings. `swapd replay` and `swapd plan --from-log` print
the results.
"""
