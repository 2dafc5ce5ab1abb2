"""A small recorded load of our own, so that what replays one runs from a clone."""
