"""From a configuration to objects: the only place that knows both sides."""
