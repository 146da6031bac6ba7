"""Attention of queries, keys and values in the unit ball."""
