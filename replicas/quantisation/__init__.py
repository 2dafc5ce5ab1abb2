"""How a model's weights are rounded to few bits: read from its configuration, before any weight is. No torch."""
