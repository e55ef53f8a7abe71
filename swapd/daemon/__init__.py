"""The daemon: requests become events of the core, and its actions become I/O."""
