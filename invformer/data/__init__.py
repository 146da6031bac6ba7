"""Text by name, its characters as tokens, and batches of windows."""
