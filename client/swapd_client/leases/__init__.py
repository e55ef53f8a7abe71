"""What each lease is, and when it is given back."""
