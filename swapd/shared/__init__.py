"""Common code of daemon and clients: messages, descriptors, the board, settings, their folder."""
