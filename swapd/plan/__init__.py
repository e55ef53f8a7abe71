"""What to keep on a device, what to stream, what to swap.

`sizes` says of what, `advise` weighs the ways, `paste` writes the settings. Pure but for reading
files: nothing is measured here, and no daemon is asked.
"""
