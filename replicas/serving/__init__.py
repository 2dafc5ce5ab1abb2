"""Engines as Ray Serve replicas: put together, started, drained. Nobody below imports it.

Begin with `engine_builder.py`.
"""
