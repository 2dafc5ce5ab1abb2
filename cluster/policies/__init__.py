"""Routing policies, one a file: each says what candidates cost.

Begin with `routing_policy.py`; `policy_table.py` lists them by name.
"""
