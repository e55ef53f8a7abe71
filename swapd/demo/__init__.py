"""Three stages of a real architecture take turns on a device that cannot hold them together."""
