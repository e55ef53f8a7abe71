"""The stream of the swap log with many readers, of which one does not read."""
