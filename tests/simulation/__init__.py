"""A daemon's shell, with simulated workers, on a virtual clock: one seed, one story."""
