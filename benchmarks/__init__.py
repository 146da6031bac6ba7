"""The performance table of benchmarks/README.md. Needs torch and invformer.nn, and nothing else."""
