"""Training: the Lightning module, its callbacks, optimisers, and the folder a run leaves."""
