"""swapd on the driver stub, with costs of published probes for its calls; see __main__.py."""
