"""The swap log: writing records, reading them, and running the core again over them."""
