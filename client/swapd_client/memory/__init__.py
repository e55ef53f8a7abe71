"""Where the bytes of components are in this process, and what is behind their addresses."""
