"""Dot-product attention and the LayerNorm before it: the baseline."""
