"""The workers: engines, KV pool, KV transfer, channels, and the thin Serve replicas around them.

Begin with `messages.py`, all that crosses between processes, and `engine/engine.py`. Files beside the folders are
used by all of them.
"""
