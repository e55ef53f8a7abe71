"""Weights from files, and new values for weights that are there already."""
