"""What each event means: one function for each, which `Residency.handle` calls."""
