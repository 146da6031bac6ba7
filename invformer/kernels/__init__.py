"""What attention and the normaliser run on; every kernel gives equal results."""
