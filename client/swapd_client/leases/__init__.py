"""State of each lease, and the time of its return."""
