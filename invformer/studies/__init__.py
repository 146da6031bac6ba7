"""Published experiments, each one command: ``python -m invformer.studies`` lists them."""
