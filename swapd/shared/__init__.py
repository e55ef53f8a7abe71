"""Code that daemon and clients share."""
