"""Checkpoints as directories of safetensors and JSON: nothing in them can be executed."""
