"""What `swapd top` shows, live: records in (`watch`), lines out (`screen`), a terminal (`app`).

`watch` and `screen` are pure. `feed` reads a daemon in a thread of its own.
"""
