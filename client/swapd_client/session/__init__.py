"""A process's session with one daemon: the connection, the registered components, the end."""
