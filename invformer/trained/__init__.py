"""A trained model: opened from a run, an exported folder or the Hub, used, and exported."""
