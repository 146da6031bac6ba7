"""Training: the Lightning module, its callbacks, optimisers, and the picture of a run."""
