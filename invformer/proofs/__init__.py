"""Which characters of a text are proven: the network in enclosures, and its margins."""
