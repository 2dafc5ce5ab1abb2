"""GPU-side workers: engines, KV pool, KV transfer, token channel, and the thin Serve replicas around them."""
