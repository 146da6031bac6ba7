"""Tied L2 attention, and the kinds of it by Kim et al. 2021."""
