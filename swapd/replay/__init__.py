"""Runs a recorded swap log again under other settings, with the real core. Does no I/O."""
