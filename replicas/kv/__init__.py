"""KV pools, and how KV moves from one engine to another."""
