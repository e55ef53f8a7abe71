"""swapd on the driver stub whose calls cost what published probes say; see __main__.py."""
