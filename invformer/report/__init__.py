"""Everything that shows an evaluation: table, plots, page, card, recovered text."""
