"""Evaluation: likelihood, certificate, local constants, inversion, and their report."""
