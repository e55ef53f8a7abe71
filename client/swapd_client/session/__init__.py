"""What a process has with one daemon: the connection, what is registered, how it ends."""
