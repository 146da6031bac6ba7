"""Feed-forward maps, of single tokens or of a few neighbours."""
