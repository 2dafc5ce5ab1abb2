"""The loop of an engine, and what watches and records it."""
