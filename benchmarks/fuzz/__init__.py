"""Invalid messages on both sockets of a daemon, beside clients that work.

`frames` makes them, pure and from a seed; `attack` sends them; `honest` is a worker beside that
checks every byte of its components; `__main__` runs all of it and reports harm to the daemon.
"""
