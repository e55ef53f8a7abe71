"""Handlers of events: one function for each, which `Residency.handle` calls."""
