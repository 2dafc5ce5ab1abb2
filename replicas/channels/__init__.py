"""What carries calls, their replies and tokens between routers and replicas.

Begin with `wire.py`.
"""
