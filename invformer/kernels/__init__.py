"""Fast code for attention, the normaliser and Muon; every kernel gives equal results."""
