"""The folder of a run: checkpoints, resuming, metrics, W&B; and the machine that it ran on."""
