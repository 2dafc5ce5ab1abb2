"""Grammars that answers must follow: what clients ask for, within bounds, compiled in a process of its own."""
