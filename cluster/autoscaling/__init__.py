"""How many replicas: the policy that Serve's controller runs, and what it goes by.

Begin with `autoscaling_policy.py`.
"""
