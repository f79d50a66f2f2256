"""Objects to frames and back."""
