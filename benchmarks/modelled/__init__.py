"""swapd on the driver stub, with the costs that its calls had on an H200; see __main__.py."""
