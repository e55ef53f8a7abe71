"""`swapd run`: commands with the daemons that they need, from before they start until they end."""
