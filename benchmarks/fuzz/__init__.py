"""Messages that no client sends, on both sockets of a daemon, beside clients that work.

`frames` makes them, pure and by a seed; `attack` sends them; `honest` is a worker beside that
checks every byte it is lent; `__main__` runs all of it and says whether the daemon took harm.
"""
