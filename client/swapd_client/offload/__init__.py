"""Any PyTorch module, its components lent by swapd, with nothing to change in it."""
