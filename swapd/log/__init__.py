"""The swap log: what is written, what is read from it, and the core run again over it."""
