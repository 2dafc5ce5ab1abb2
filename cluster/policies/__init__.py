"""Routing policies, one a file: each says what candidates cost. `policy_table` lists them by name."""
