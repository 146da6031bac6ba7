"""Numerics on torch alone: bounds, certified norms, estimators, solvers, log-determinants."""
