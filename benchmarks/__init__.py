"""What README's performance table is made of. Needs torch and invformer.nn, and nothing else."""
