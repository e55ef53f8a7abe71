"""The addresses of components in this process, and the memory behind them."""
