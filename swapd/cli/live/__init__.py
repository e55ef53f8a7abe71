"""The live view of `swapd top`: records in (`watch`), lines out (`screen`), a terminal (`app`).

`watch` and `screen` are pure. `feed` reads a daemon in its own thread.
"""
