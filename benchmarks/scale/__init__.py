"""What swapd costs when there is much of everything, beside what it costs when there is little."""
