"""A run from start to end: folder, checkpoints, resuming, signals, processes, exit code, W&B."""
