"""Attaches any unchanged PyTorch module to swapd, which then lends its components."""
