"""Workers that use all of swapd's features while they, and the daemon, are killed and stopped.

`book` knows the right bytes of each component; `worker` and `looper` use threads and an event loop,
and `stayer` joins each next daemon; `counts` survive the counting process; `__main__` kills, stops,
restarts, and adds up.
"""
