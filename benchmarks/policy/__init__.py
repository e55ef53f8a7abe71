"""Decisions of the core over traces: order of service, and eviction, beside what others do."""
