"""Lipschitz bounds, one file per source; every function names its norm and its theorem."""
