"""Costs of swapd with large numbers of everything, beside its costs with small numbers."""
