"""What several rooms share: models, runs, oracles, processes, doubles of Hub and W&B."""
