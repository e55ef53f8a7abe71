"""What daemon and clients both use: the wire, descriptors, the board, settings, where they meet."""
