"""Residual branches: an operator is one folder; branch.py is what the program asks of all."""
