"""Numerics on torch alone: norms, outward rounding, fixed points, log-determinants."""
