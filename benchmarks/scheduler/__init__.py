"""The decode scheduler alone: what its decisions cost while many requests wait."""
