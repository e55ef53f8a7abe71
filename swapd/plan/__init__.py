"""Plans which components to keep on a device, to stream and to swap.

Nothing here runs a measurement or asks a daemon: models are measured by their files.
"""
