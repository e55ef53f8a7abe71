"""The live view of `swapd top`: a daemon's status (`poller`), as lines (`screen`), on a terminal
(`app`). `screen` is pure.
"""
