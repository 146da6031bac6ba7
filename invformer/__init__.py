"""Invertible, provably Lipschitz Transformers: train, certify, monitor and invert them.

The public names live in the packages: ``invformer.nn`` (layers and models), ``invformer.numerics``
(bounds, estimators, solvers). This module imports neither, so that command lines answer at once.
"""

__version__ = "0.1.0"
